"""EMULATED_TILES=1 in the environment runs the CPU kernels on emulated AMX."""

import os

if os.environ.get("EMULATED_TILES") == "1":
    from pallas_kernels.cpu import tile
    from tests.kernels.emulated_tiles import EmulatedTiles

    tile.TILES = EmulatedTiles()
    tile.has = lambda name: name == "amx-bf16"
