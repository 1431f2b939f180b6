from torchrl_llm.evaluation.report.explain import explain as explain
from torchrl_llm.evaluation.report.page import rollout_page as rollout_page
