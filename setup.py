"""Packaging, read from settings.ini."""
from configparser import ConfigParser
from pathlib import Path

from setuptools import find_packages, setup

here = Path(__file__).parent
parser = ConfigParser(delimiters=["="])
parser.read(here / "settings.ini", encoding="utf-8")
cfg = parser["DEFAULT"]
readme = here / "README.md"
extras = {"search": ("optuna",), "grid": ("submitit",), "wandb": ("wandb",), "nf4": ("bitsandbytes",), "gguf": ("gguf",), "notebooks": ("papermill", "jupyterlab", "ipykernel", "ipywidgets")}

setup(
    name=cfg["lib_name"],
    version=cfg["version"],
    description=cfg["description"],
    long_description=readme.read_text(encoding="utf-8") if readme.exists() else cfg["description"],
    long_description_content_type="text/markdown",
    author=cfg["author"],
    url=cfg["git_url"] or None,
    license="Apache-2.0",
    keywords=cfg["keywords"],
    packages=find_packages(include=["himalaya_hest", "himalaya_hest.*"], exclude=["himalaya_hest.study*", "himalaya_hest.workshop*"]), # these judge and check this project
    package_data={"himalaya_hest": ["data/**/*", "py.typed"]},
    python_requires=">=" + cfg["min_python"],
    install_requires=cfg["requirements"].split(),
    extras_require={"dev": (cfg["dev_requirements"] + " " + cfg["onnx_requirements"]).split(), "onnx": cfg["onnx_requirements"].split()} | {extra: [r for r in cfg["dev_requirements"].split() if r.startswith(packages)] for extra, packages in extras.items()},
    entry_points={
        "console_scripts": cfg.get("console_scripts", "").split(),
        "nbdev": [f'{cfg["lib_path"]}={cfg["lib_path"]}._modidx:d'],
    },
    zip_safe=False,
)
