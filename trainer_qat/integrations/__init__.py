# SPDX-License-Identifier: Apache-2.0
"""QUADS in the training loops people have; each module needs the framework that it is named after.

trainer_qat.integrations.trl           GRPOTrainer with a colocated or a served QUADS rollout
trainer_qat.integrations.hf            transformers Trainer and accelerate: a callback
trainer_qat.integrations.verl          verl's FSDP engine and vLLM rollout
trainer_qat.integrations.nemo_rl       NeMo-RL's DTensor policy and vLLM generation
"""
