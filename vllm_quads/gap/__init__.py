# SPDX-License-Identifier: Apache-2.0
"""The gap experiment: how far the rollout's policy is from the trainer's, arm by arm, on the same tokens."""
