"""Algorithms: a loss and an advantage estimator under one name, and presets of those of papers.

Any loss goes with any advantage estimator. A preset names a pair, with the defaults of its paper;
with ``style="ludic"`` those of Ludic where they differ. In ``sota-implementations/grpo`` the same
pairs are configured as ``loss=... advantage=...``.
"""

from __future__ import annotations

from torchrl_llm._imports import lazy

_LAZY = {
    "torchrl_llm.algorithms.algorithm": "Algorithm",
    "torchrl_llm.algorithms.presets": (
        "Preset make_cispo make_dapo make_dr_grpo make_gmpo make_grpo make_gspo make_mopd "
        "make_opd make_ppo make_reinforce make_reinforce_plus_plus make_rloo make_sapo "
        "make_scalerl make_sft"
    ),
}
__getattr__ = lazy(__name__, _LAZY)
