# SPDX-License-Identifier: Apache-2.0
"""Everything is in pyproject.toml but this: the CUDA sources of csrc/ ship inside the package, as vllm_quads/csrc."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["vllm_quads*", "trainer_qat*"]), "vllm_quads.csrc"],
    package_dir={"vllm_quads.csrc": "csrc"},
    package_data={
        "vllm_quads": ["py.typed", "gap/prompts.txt"],
        "trainer_qat": ["py.typed"],
        "vllm_quads.csrc": ["*.cu", "*.cuh"],
    },
)
