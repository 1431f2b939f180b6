from torchrl_llm.recipes.front import DPO as DPO, GRPO as GRPO, SFT as SFT

__version__: str
