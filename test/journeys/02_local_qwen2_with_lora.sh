# A Qwen2 of one's own from a local folder, trained by adapters; the result opens without PEFT.
python - <<'PY'
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from torchrl_llm.modules import load_tokenizer

torch.manual_seed(0)
tokenizer = load_tokenizer()
config = Qwen2Config(
    vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
    tie_word_embeddings=True, eos_token_id=tokenizer.eos_token_id,
)
Qwen2ForCausalLM(config).save_pretrained("qwen2")
tokenizer.save_pretrained("qwen2")
PY
torchrl-llm train grpo model.name=qwen2 train_model.lora.enabled=true train.max_steps=4 \
    inference_model.max_tokens=6 eval.num_prompts=32 hydra.run.dir=run
python "$HERE/metric.py" run train/reward count '==' 4
test -d run/checkpoints/step_000004/adapter
python - <<'PY'
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("run/checkpoints/step_000004")
assert not any("lora" in name for name, _ in model.named_parameters())
PY
