from torchrl_llm.recipes.front import GRPO as GRPO, SFT as SFT

__version__: str
