"""The theory in a run: the picture and the table of what `theory.study` has measured."""

from typing import Any

import numpy as np
from matplotlib.figure import Figure
from theory import WAYS, bound

from pfedafm_jax.results.style import BLUE, GREEN, GREY, ORANGE, panels, whole_numbers

PLACES = ("one step of gradient descent", "phase 1", "phase 2", "aggregation")  # what WAYS are
SHADES = (BLUE, ORANGE, GREEN, GREY)


def figure(result: dict[str, Any]) -> Figure:
    """Theorem 2 by T; smoothness by round beside the learning rates; aggregation and the loss."""
    drawn, [[left, middle, right]] = panels(1, 3, 4.0, 5.2)
    T, average = np.array(result["T"], float), np.array(result["average"])
    left.loglog(T, result["by_round"], ".", color=BLUE, alpha=0.4, label="‖∇L‖² of a round")
    left.loglog(T, average, "o-", color=BLUE, markersize=3.5, label="its average up to T")
    high = int(np.argmax(average)) % (len(T) - 1 or 1)  # guides start where the average falls
    left.loglog(T[high:], average[high] * T[high] / T[high:], "--", color=GREY, label="as 1/T")
    for key, label, colour in (("bound", "largest", ORANGE), ("typical_bound", "typical", GREEN)):
        void = result[key][0] is None
        text = f"Theorem 2, {label} constants{': void, η ≥ 2/L₁' if void else ''}"
        left.loglog([] if void else T, [] if void else result[key], color=colour, label=text)
    left.set(xlabel="rounds T", ylabel="mean over rounds and steps", title="Theorem 2")

    visits = [(row["round"], each) for row in result["rounds"] for each in row["visits"]]
    for (first, second), label, colour in zip(WAYS, PLACES, SHADES, strict=True):
        ratios = [each["smoothness"][f"{first} to {second}"] or np.nan for _, each in visits]
        middle.semilogy([t for t, _ in visits], ratios, "o", ms=3.5, color=colour, label=label)
    for (label, rate), style in zip(_rates(result).items(), ("-", "--"), strict=False):
        middle.axhline(2 / rate, color="black", linestyle=style, label=f"2/η, {label}")
    middle.set(xlabel="round", ylabel="‖∇L(h') − ∇L(h)‖ / ‖h' − h‖", title="Smoothness, Eq. 13")
    whole_numbers(middle.xaxis)

    taken = [result["constants"]["eta"] * each["variation"] for _, each in visits]
    changes = [each["loss"]["aggregated"] - each["loss"]["trained"] for _, each in visits]
    right.plot(taken, changes, "o", color=BLUE, markersize=4, label="a participant in a round")
    right.plot([0, max(taken)], [0, max(taken)], "--", color=GREY, label="as Lemma 2 takes it")
    right.set(xlabel="η ‖θ − θ_k‖²", ylabel="change of the loss by aggregation", title="Lemma 2")
    for axes in (left, middle, right):
        axes.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.14))
    return drawn


def _rates(result: dict[str, Any]) -> dict[str, float]:
    """Learning rates of what is trained, by name."""
    own = result["config"]["pfedafm"]
    mix = {} if own["mix_fixed"] is not None else {"the mix vector": own["mix_learning_rate"]}
    return {"the networks": result["constants"]["eta"], **mix}


def rows(result: dict[str, Any]) -> list[tuple[str, str]]:
    """What was measured, beside what the paper assumes and concludes; for a table."""
    most, usual, lemmas = (result[name] for name in ("constants", "typical", "lemmas"))
    epsilon = most["E"] * result["average"][-1]  # the theorem sums over a round's steps
    allowed = 2 * (epsilon - most["delta2"]) / most["L1"] / (epsilon + most["E"] * most["sigma2"])
    found = {
        "L₁, smoothness (Eq. 13): typical, largest": (usual["L1"], most["L1"]),
        "σ², variance of a batch (Eq. 16): typical, largest": (usual["sigma2"], most["sigma2"]),
        "δ², ‖θ − θ_k‖² (Eq. 17): typical, largest": (usual["delta2"], most["delta2"]),
        f"average of ‖∇L‖² over {result['T'][-1]} rounds": (result["average"][-1],),
        "it goes as T to the power of (second half; the paper: -1)": (result["slope"],),
        "its bound (Eq. 30): typical, largest": (result["typical_bound"][-1], result["bound"][-1]),
        "the part that does not fall with T": (bound(np.inf, **usual), bound(np.inf, **most)),
        f"η of {', of '.join(_rates(result))}": tuple(_rates(result).values()),
        "2/L₁, which η must be below: typical, largest": (2 / usual["L1"], 2 / most["L1"]),
        "η that Eq. 34 allows for the ε reached": (allowed,),
        "Lemma 1, fall of the loss: seen, at least": (lemmas["loss_fall"], lemmas["lemma1_fall"]),
        "Lemma 2, change by aggregation": (lemmas["loss_change"],),
        "η‖θ − θ_k‖², which the proof puts in its place": (lemmas["eta_variation"],),
        f"Lemma 2 holds in, of {lemmas['visits']} visits": (lemmas["lemma2_holds"],),
        "visits of a client seen at all": (result["visits"][-1],),
    }
    void = "void"  # where η ≥ 2/L₁ the theorem says nothing
    return [
        (name, ", ".join(void if value is None else f"{value:.3g}" for value in values))
        for name, values in found.items()
    ]
