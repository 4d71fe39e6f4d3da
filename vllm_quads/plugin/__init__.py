# SPDX-License-Identifier: Apache-2.0
"""The vLLM plugin: quantization config, MoE and linear methods, weight loading, refit. The only part that imports vLLM.

`registration.register` is what vLLM calls in each of its processes. `engine` is what users of an in-process `LLM` call.
"""
