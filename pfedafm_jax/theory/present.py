"""The picture and the table of what `study` has measured."""

from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from pfedafm_jax.plots import BLUE, GREEN, GREY, ORANGE
from pfedafm_jax.theory.estimators import bound

PLACES = {
    "start to step": ("one step of gradient descent", BLUE),
    "start to local": ("phase 1", ORANGE),
    "local to trained": ("phase 2", GREEN),
    "trained to aggregated": ("aggregation", GREY),
}


def figure(result: dict[str, Any]) -> Figure:
    """Theorem 2 by T; smoothness by round beside the learning rate's condition; what aggregation does to the loss."""
    drawn = Figure(figsize=(12.0, 5.2), layout="constrained")
    left, middle, right = drawn.subplots(1, 3)
    for axes in (left, middle, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25, linewidth=0.6)
    _convergence(left, result)
    _smoothness(middle, result)
    _aggregation(right, result)
    return drawn


def _legend(axes: Any) -> None:
    axes.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.14))


def _convergence(axes: Any, result: dict[str, Any]) -> None:
    T, average = np.array(result["T"], float), np.array(result["average"])
    axes.loglog(T, result["by_round"], ".", color=BLUE, alpha=0.4, label="‖∇L‖² of a round")
    axes.loglog(T, average, "o-", color=BLUE, markersize=3.5, linewidth=1.6, label="its average up to T")
    high = int(np.argmax(average)) % (len(T) - 1 or 1)  # orientation starts where the average falls
    for name, power, style in (("1/T", 1.0, "--"), ("1/√T", 0.5, ":")):
        guide = average[high] * (T[high] / T[high:]) ** power
        axes.loglog(T[high:], guide, style, color=GREY, linewidth=1.2, label=f"{name}, for orientation")
    for key, label, colour in (("bound", "Theorem 2, constants at their largest", ORANGE),
                               ("typical_bound", "Theorem 2, typical constants", GREEN)):  # fmt: skip
        if result[key][0] is not None:
            axes.loglog(T, result[key], color=colour, linewidth=1.3, label=label)
    if result["bound"][0] is None:
        axes.plot([], [], " ", label="Theorem 2, constants at their largest: void, η ≥ 2/L₁")
    axes.set(xlabel="rounds T", ylabel="mean over rounds and steps", title="Theorem 2")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter(NullFormatter())
    _legend(axes)


def _smoothness(axes: Any, result: dict[str, Any]) -> None:
    for key, (label, colour) in PLACES.items():
        pairs = [
            (row["round"], visit["smoothness"][key])
            for row in result["rounds"]
            for visit in row["visits"]
            if visit["smoothness"][key]
        ]
        if pairs:
            axes.semilogy(*zip(*pairs, strict=True), "o", color=colour, markersize=3.5, alpha=0.7, label=label)
    rates = {"η of the networks": result["constants"]["eta"], "η of the mix vector": _mix_rate(result)}
    for (label, rate), style in zip(rates.items(), ("-", "--"), strict=True):
        if rate:
            axes.axhline(2 / rate, color="black", linestyle=style, linewidth=1, label=f"2/η, {label}")
    axes.set(xlabel="round", ylabel="‖∇L(h') − ∇L(h)‖ / ‖h' − h‖", title="Smoothness $L_1$, Eq. 13")
    _legend(axes)


def _aggregation(axes: Any, result: dict[str, Any]) -> None:
    visits = [visit for row in result["rounds"] for visit in row["visits"]]
    taken = [result["constants"]["eta"] * visit["variation"] for visit in visits]
    changes = [visit["loss"]["aggregated"] - visit["loss"]["trained"] for visit in visits]
    axes.plot(taken, changes, "o", color=BLUE, markersize=4, alpha=0.7, label="a participant in a round")
    most = max(max(taken), 1e-12)
    axes.plot([0, most], [0, most], "--", color=GREY, linewidth=1.2, label="as Lemma 2 takes it")
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set(xlabel="η ‖θ − θ$_k$‖²", ylabel="change of the loss by aggregation", title="Lemma 2, Eq. 25")
    _legend(axes)


def _mix_rate(result: dict[str, Any]) -> float:
    own = result["config"]["pfedafm"]
    return 0.0 if own["mix_fixed"] is not None else own["mix_learning_rate"]


def markdown(result: dict[str, Any]) -> str:
    """What was measured, beside what the paper assumes and concludes."""
    most, usual, lemmas, config = result["constants"], result["typical"], result["lemmas"], result["config"]
    T, average, mix_rate = result["T"][-1], result["average"][-1], _mix_rate(result)
    rows = [
        ("L₁, smoothness (Eq. 13)", f"{usual['L1']:.3g}", f"{most['L1']:.3g}"),
        (
            f"σ², variance of a batch of {config['batch_size']} (Eq. 16)",
            f"{usual['sigma2']:.3g}",
            f"{most['sigma2']:.3g}",
        ),
        ("δ², ‖θ − θ_k‖² by aggregation (Eq. 17)", f"{usual['delta2']:.3g}", f"{most['delta2']:.3g}"),
        (
            f"bound of Theorem 2 at T = {T}, per step (Eq. 30)",
            _said(result["typical_bound"][-1]),
            _said(result["bound"][-1]),
        ),
        ("the part of it that does not fall with T", _said(bound(np.inf, **usual)), _said(bound(np.inf, **most))),
        ("2/L₁, which η must be below", f"{2 / usual['L1']:.3g}", f"{2 / most['L1']:.3g}"),
    ]
    lines = ["| | typical | largest |", "|---|---|---|", *(f"| {' | '.join(row)} |" for row in rows), ""]
    slope = (
        "" if result["slope"] is None else f"; it goes as T^{result['slope']:.2f} over the second half (1/T is T^-1)"
    )
    rates = {"networks": most["eta"], **({"mix vector": mix_rate} if mix_rate else {})}
    lines += [
        f"- Measured average of ‖∇L‖² over {T} rounds and their steps: {average:.3g}{slope}.",
        f"- {' '.join(_condition(name, rate, most['L1']) for name, rate in rates.items())}",
        f"- {_epsilon(result)}",
        f"- Lemma 1: local training lowers the loss by {lemmas['loss_fall']:.3g} on average; {_lemma1(result)}.",
        f"- Lemma 2: aggregation changes the loss by {lemmas['loss_change']:.3g} on average; η‖θ − θ_k‖², which the proof puts "
        f"in its place, is {lemmas['eta_variation']:.3g} and an upper bound in {lemmas['lemma2_holds']} of "
        f"{lemmas['visits']} visits.",
    ]
    if config["participation"] < 1:
        lines.append(
            f"- The theorem has every client in every round. Here a client seen at all has had {result['visits'][-1]:.2f} visits "
            f"in {T} rounds, and Δ/T is Δ over these."
        )
    steps = [
        f"{name} {config[key]:g}"
        for name, key in (("momentum", "momentum"), ("weight decay", "weight_decay"))
        if config[key]
    ]
    if steps:
        lines.append(
            f"- Steps are not the h − ηg of the theory: {', '.join(steps)}, clipping at {config['clip_norm']:g}."
        )
    lines.append("- Phase 2 follows the gradient of another loss than the mixed model's, so θ does not move along −∇L.")
    return "\n".join(lines) + "\n"


def _said(value: float | None) -> str:
    return "void (η ≥ 2/L₁)" if value is None else f"{value:.3g}"


def _lemma1(result: dict[str, Any]) -> str:
    least = result["lemmas"]["lemma1_fall"]
    if result["bound"][-1] is None:
        return "the lemma promises nothing where η ≥ 2/L₁"
    told = f"should do so by {least:.3g} at least" if least > 0 else f"may rise by {-least:.3g}"
    return f"by the lemma it {told} (three points a round)"


def _condition(name: str, rate: float, smooth: float) -> str:
    verdict = "holds" if rate < 2 / smooth else "does **not** hold"
    return f"η < 2/L₁ {verdict} for the {name}: η = {rate:g}, 2/L₁ = {2 / smooth:.3g} at the largest L₁ seen."


def _epsilon(result: dict[str, Any]) -> str:
    """The condition of Theorem 2 for the ε that was reached."""
    most = result["constants"]
    epsilon = most["E"] * result["average"][-1]  # the theorem sums over a round's steps
    if epsilon <= most["delta2"]:
        return (
            f"The condition η < 2(ε − δ²) / L₁(ε + Eσ²) (Eq. 34) has no solution for the ε = {epsilon:.3g} that was reached: "
            f"δ² = {most['delta2']:.3g} is above it."
        )
    highest = 2 * (epsilon - most["delta2"]) / (most["L1"] * (epsilon + most["E"] * most["sigma2"]))
    verdict = "holds" if most["eta"] < highest else "does **not** hold"
    return (
        f"The condition of Eq. 34 for the ε = {epsilon:.3g} that was reached asks for η < {highest:.3g}: it {verdict}."
    )
