"""cable_for_transformers.py -- a checkpoint of any encoding as a model of the transformers library (4.40 or later).

dev/hf/export.py puts this file beside the weights. Then, on a machine without this repository:

    model = AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True)
    model(input_ids, labels=input_ids).loss
    model.generate(input_ids, max_new_tokens=20)    # no cache: every token runs the whole text again
"""
import torch.nn.functional as F
from transformers import PretrainedConfig, PreTrainedModel
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import CausalLMOutput

from .modeling_cable import CableConfig, CableGPT2


class CableTransformersConfig(PretrainedConfig):
    model_type = "cable"
    attribute_map = {"hidden_size": "n_embd", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer",
                     "max_position_embeddings": "n_positions"}

    def __init__(self, n_layer=12, n_head=12, n_embd=768, vocab_size=50257, n_positions=1024, position=None,
                 layer_norm_epsilon=1e-5, rope_scaling=None, **others):
        self.n_layer, self.n_head, self.n_embd = n_layer, n_head, n_embd
        self.vocab_size, self.n_positions = vocab_size, n_positions
        self.position = position or {"name": "cable"}
        self.layer_norm_epsilon = layer_norm_epsilon
        others["use_cache"] = False                 # there is none
        super().__init__(**others)
        self.rope_scaling = rope_scaling            # ours: the library's own checks know no "ntk"


class CableForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = CableTransformersConfig
    base_model_prefix = "transformer"

    def __init__(self, config):
        super().__init__(config)
        names = ("n_layer", "n_head", "n_embd", "vocab_size", "n_positions", "position", "layer_norm_epsilon",
                 "rope_scaling")
        core = CableGPT2(CableConfig(**{name: getattr(config, name) for name in names}))
        self.transformer = core.transformer         # the parameters, named as in the checkpoint
        self.core = [core]                          # in a list: what runs them does not own them
        self.post_init()

    def _init_weights(self, module):
        pass                                        # CableGPT2 has drawn them

    def get_input_embeddings(self):
        return self.transformer["wte"]

    def forward(self, input_ids, attention_mask=None, labels=None, rope_scaling=None, return_dict=True, **ignored):
        """labels as in transformers: input_ids, or -100 where there is no loss; they are shifted here"""
        if attention_mask is not None and not attention_mask.bool().all():
            raise ValueError("attention_mask: the model was trained on full rows and masks none; score one text at a "
                             "time")
        logits, _ = self.core[0](input_ids, rope_scaling=rope_scaling)
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        return CausalLMOutput(loss=loss, logits=logits) if return_dict else (loss, logits)

    def prepare_inputs_for_generation(self, input_ids, attention_mask=None, **ignored):
        return {"input_ids": input_ids, "attention_mask": attention_mask}
