"""What the pictures of all experiments share: colours, markers, and their files.

Owns the backend and the resolution. Never sees a result.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.figure import Figure

# Okabe and Ito's palette, to be told apart by everybody; markers help in grey.
COLORS = ("#000000", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
MARKERS = "osD^vPX*"


def save(figure: Figure, path: Path) -> None:
    """Write a picture to a file, and forget it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)
