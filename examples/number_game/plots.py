"""The demo's curves as a picture and in the terminal."""

from __future__ import annotations

from pathlib import Path

from examples.number_game.curves import Curves


def smooth(values: list[float], width: int = 5) -> list[float]:
    """The mean of the last ``width`` values at each point."""
    return [
        sum(values[max(0, i + 1 - width) : i + 1]) / min(i + 1, width) for i in range(len(values))
    ]


def save_png(runs: dict[int, Curves], path: Path) -> None:
    """Mean reward of each step's batch against the version that it made, one line a seed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for seed, curves in runs.items():
        means = curves.by_version()
        (line,) = axes.plot(list(means), smooth(list(means.values())), label=f"seed {seed}")
        axes.plot(list(means), list(means.values()), color=line.get_color(), alpha=0.2)
    axes.axhline(0.5, color="grey", linewidth=0.8, linestyle="--")
    axes.set(xlabel="policy version", ylabel="mean reward of its batch", ylim=(0, 1))
    axes.set_title("Number game: an agent learns while it plays")
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def show_in_terminal(runs: dict[int, Curves]) -> None:
    """The same, in characters."""
    import plotext

    plotext.clear_figure()
    plotext.plot_size(76, 16)
    for seed, curves in runs.items():
        means = curves.by_version()
        plotext.plot(list(means), smooth(list(means.values())), label=f"seed {seed}")
    plotext.ylim(0, 1)
    plotext.xlabel("policy version")
    plotext.title("mean reward of each batch")
    plotext.theme("clear")
    print(plotext.uncolorize(plotext.build()))
