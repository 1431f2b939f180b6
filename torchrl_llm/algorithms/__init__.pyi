from torchrl_llm.algorithms.algorithm import Algorithm as Algorithm
from torchrl_llm.algorithms.presets import (
    Preset as Preset,
    make_cispo as make_cispo,
    make_dapo as make_dapo,
    make_dr_grpo as make_dr_grpo,
    make_gmpo as make_gmpo,
    make_grpo as make_grpo,
    make_gspo as make_gspo,
    make_mopd as make_mopd,
    make_opd as make_opd,
    make_ppo as make_ppo,
    make_reinforce as make_reinforce,
    make_reinforce_plus_plus as make_reinforce_plus_plus,
    make_rloo as make_rloo,
    make_sapo as make_sapo,
    make_scalerl as make_scalerl,
    make_sft as make_sft,
)
