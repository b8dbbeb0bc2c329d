"""Compile the CPU kernel into a wheel if DRAFTWING_WHEEL names its platform, one of ``PLATFORMS``.

Zig compiles for every platform on any, against the oldest C library that the platform's name allows, and links its
C++ library statically. ``cpu/build.py`` chooses among the libraries. With DRAFTWING_KERNEL_ARCH, only that is compiled.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

# Zig's name of each platform, and its names of the levels in ``cpu/build.py``. Tiles (AMX) are tried before use.
PLATFORMS = {
    "manylinux_2_28_x86_64": (
        "x86_64-linux-gnu.2.28",
        {
            "x86-64-v4+avx512vnni+amx": "x86_64_v4+avx512vnni+amx_int8+amx_bf16",
            "x86-64-v3+avxvnni": "x86_64_v3+avxvnni",
            "x86-64-v3": "x86_64_v3",
        },
    ),
    "manylinux_2_28_aarch64": (
        "aarch64-linux-gnu.2.28",
        {
            "armv8.2-a+dotprod+i8mm": "generic+v8_2a+dotprod+i8mm",
            "armv8.2-a+dotprod": "generic+v8_2a+dotprod",
        },
    ),
    "macosx_12_0_arm64": ("aarch64-macos.12.0", {"apple-m1": "apple_m1"}),
}


class KernelHook(BuildHookInterface):
    def dependencies(self) -> list[str]:
        return ["ziglang>=0.17"] if os.environ.get("DRAFTWING_WHEEL") else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        platform = os.environ.get("DRAFTWING_WHEEL")
        if not platform or version == "editable":
            return
        if platform not in PLATFORMS:
            raise ValueError(f"DRAFTWING_WHEEL is {platform!r}: give one of {', '.join(PLATFORMS)}, or unset it")
        sys.path.insert(0, str(Path(self.root) / "src"))
        from draftwing.cpu.build import FLAGS, SOURCES, hash_of

        self._folder = tempfile.TemporaryDirectory(prefix="draftwing-")
        target, levels = PLATFORMS[platform]
        for level, arch in levels.items():
            if os.environ.get("DRAFTWING_KERNEL_ARCH") not in (None, "", level):
                continue
            made = Path(self._folder.name) / level
            command = [sys.executable, "-m", "ziglang", "c++", *FLAGS, "-s", "-target", target, f"-march={arch}"]
            subprocess.run([*command, "-o", str(made), "kernel.cpp"], check=True, cwd=SOURCES)
            name = f"{level}-{hash_of(made.read_bytes())}.so"
            build_data["force_include"][str(made)] = f"draftwing/cpu/prebuilt/{name}"
        build_data["pure_python"], build_data["tag"] = False, f"py3-none-{platform}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if not build_data["pure_python"]:
            self._folder.cleanup()
