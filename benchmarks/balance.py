"""How evenly work is dealt out: `python benchmarks/balance.py` deals participants of many rounds to devices and to
processes as the engine does, without training anybody, and prints what is lost.

All clients have 480 training images and the five CNNs in turn; a round of pFedAFM has two stages, each dealt by itself.
"""

import numpy as np
from rich.table import Table

from pfedafm_jax.cli import console, guarded
from pfedafm_jax.engine import draw_participants
from pfedafm_jax.engine.schedule import assign, schedule, slots_per_device
from pfedafm_jax.models import describe

IMAGES, BATCH, ROUNDS = 480, 64, 100
NETWORKS = [describe(f"cnn{number}", 10, (32, 32, 3)) for number in range(1, 6)]


def over_devices(devices: int, chunk: int, clients: int = 100, participants: int = 10) -> tuple[float, float]:
    """Shares of work on padding (empty places in a chunk, short batches) and of time that devices wait for the last."""
    groups = np.arange(clients) % len(NETWORKS)
    own = IMAGES * np.array([network.macs for network in NETWORKS], float)[groups]
    stages = [(groups, own), (np.zeros_like(groups), np.full(clients, float(IMAGES * NETWORKS[-1].macs)))]
    done = useful = available = 0.0
    for number in range(1, ROUNDS + 1):
        drawn = draw_participants(0, number, clients, participants).tolist()
        for kinds, work in stages:
            slots = slots_per_device(participants, len(set(kinds)), devices, chunk)
            load = np.zeros(devices)
            for call in schedule(drawn, kinds, work, num_devices=devices, chunk=chunk, slots=slots):
                for device, row in enumerate(call.clients):
                    for place in row[: call.trips[device] * chunk].reshape(-1, chunk):
                        load[device] += chunk * work[place[place >= 0]].max()
            done, useful, available = done + load.sum(), useful + work[drawn].sum(), available + devices * load.max()
    batches = IMAGES / (BATCH * -(-IMAGES // BATCH))
    return 1 - batches * useful / done, 1 - done / available


def over_processes(clients: int, participants: int, processes: int) -> tuple[float, float]:
    """After 100 rounds: the share of participants whose state travels, and the slowest process over the mean."""
    work = IMAGES * np.array([network.macs for network in NETWORKS], float)[np.arange(clients) % len(NETWORKS)]
    home, moved, slowest = np.full(clients, -1), 0, []
    for number in range(1, 2 * ROUNDS + 1):
        drawn = draw_participants(0, number, clients, participants)
        found = assign(drawn.tolist(), work, home, np.ones(processes, int))
        if number > ROUNDS:
            moved += int(np.sum((home[drawn] >= 0) & (home[drawn] != found)))
            load = np.bincount(found, work[drawn], processes)
            slowest.append(load.max() / load.mean())
        home[drawn] = found
    return moved / (ROUNDS * participants), float(np.mean(slowest))


def main() -> None:
    table = Table("devices", "clients a step", "work on padding", "devices waiting", box=None, title="N = 100, K = 10")
    for devices, chunk in ((1, 1), (2, 1), (4, 1), (8, 1), (1, 2), (2, 2)):
        padding, waiting = over_devices(devices, chunk)
        table.add_row(str(devices), str(chunk), f"{100 * padding:.1f} %", f"{100 * waiting:.1f} %")
    console.print(table)
    table = Table("N", "K", "processes", "states that travel", "slowest over mean", box=None)
    for clients, participants, processes in ((100, 10, 2), (1000, 100, 4), (10_000, 160, 16), (10_000, 1000, 16)):
        moved, slowest = over_processes(clients, participants, processes)
        table.add_row(str(clients), str(participants), str(processes), f"{100 * moved:.1f} %", f"{slowest:.3f}")
    console.print(table)


if __name__ == "__main__":
    guarded(main)
