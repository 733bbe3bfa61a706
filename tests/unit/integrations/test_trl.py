"""The trainers of TRL that are shipped with chunks; tests/live has many more cases with the mixins."""

import dataclasses
import importlib.util
import sys

import peft
import pytest
import torch
import trl
from support import inside
from support.models import make_model
from support.texts import count_sevens, make_tokenizer, prompts
from support.trainers import arguments, assert_same_weights, logged, smallest_budget
from trl.generation import vllm_generation

import hf_patrickstar
from hf_patrickstar.integrations.trl import PatrickStarGRPOConfig, PatrickStarGRPOTrainer

GRPO = (trl.GRPOTrainer, trl.GRPOConfig), (PatrickStarGRPOTrainer, PatrickStarGRPOConfig)


class FakeClient:
    """What ``trl.generation.vllm_client.VLLMClient`` offers to ``VLLMGeneration`` (TRL 1.16), without a server.

    It copies what it gets, as the real client does, and completes every prompt with tokens that depend on the weights.
    """

    made = ()
    model = None  # whose values should come

    def __init__(self, base_url=None, group_port=None, connection_timeout=None):
        FakeClient.made = (self,)
        self.syncs, self.held, self.resets, self.announced = [], [], 0, []

    def init_communicator(self, device=None):
        pass

    def get_server_info(self):
        return {"model_config": {"logprobs_mode": "processed_logprobs"}}

    def update_named_params(self, metadata, named_params):
        got = {}
        self.announced.append(metadata)
        for name, tensor in named_params:
            got[name] = tensor.clone()
            self.held.append(bytes_handed_out(self.model))
        self.syncs.append(got)

    def reset_prefix_cache(self):
        self.resets += 1

    def generate(self, prompts, n, max_tokens, **kwargs):
        first = next(iter(self.syncs[-1].values())).sum().abs()
        tokens = [[4 + int(first * 1e4 + 7 * i + j) % 90 for j in range(max_tokens)] for i in range(len(prompts) * n)]
        logprobs = [[[-0.5] for _ in row] for row in tokens]
        return {"prompt_ids": prompts, "completion_ids": tokens, "logprobs": logprobs}


def bytes_handed_out(model):
    engine = getattr(model, "patrickstar_engine", None)
    return 0 if engine is None else sum(mirror.nbytes for mirror in inside.mirrors(engine))


def largest(model, count):
    """Bytes of the largest parameters of a model."""
    return sum(sorted((p.numel() * p.element_size() for p in model.parameters()), reverse=True)[:count])


def test_the_classes_are_names_of_the_package_and_an_error_names_the_extra(monkeypatch):
    assert hf_patrickstar.PatrickStarGRPOTrainer is PatrickStarGRPOTrainer
    assert not hf_patrickstar._OF_TRL & set(hf_patrickstar.__all__), "a star import would need TRL"
    monkeypatch.setitem(sys.modules, "trl", None)
    path = sys.modules[PatrickStarGRPOTrainer.__module__].__file__
    spec = importlib.util.spec_from_file_location("a_copy_of_the_module", path)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'hf_patrickstar\[trl\]'"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def train(classes, tmp_path, data, model, trainer_kwargs, **kwargs):
    base, arguments_class = classes
    if "patrickstar" in {field.name for field in dataclasses.fields(arguments_class)}:
        kwargs |= {
            "patrickstar": True,
            "patrickstar_config": {"chunk_budget": 2 * smallest_budget(make_model("llama"))},
        }
    kwargs = {"bf16": False, "gradient_checkpointing": False, "per_device_train_batch_size": 2, **kwargs}
    args = arguments(arguments_class, tmp_path, max_steps=2, **kwargs)
    torch.manual_seed(7)
    trainer = base(model=model, args=args, train_dataset=data, processing_class=make_tokenizer(), **trainer_kwargs)
    FakeClient.model = trainer.model
    trainer.train()
    return trainer


def assert_trained_the_same(stock, ours):
    assert len(logged(stock, "loss")) == stock.args.max_steps
    for key in ("loss", "grad_norm", "reward", "kl", "rewards/margins"):
        assert logged(ours, key) == logged(stock, key)
    assert_same_weights(stock.model, ours.model)
    assert ours.patrickstar_stats()["chunk_evictions"] > 0


def make_adapted():
    torch.manual_seed(3)
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    return peft.get_peft_model(make_model("llama"), config)


@pytest.mark.parametrize("make_trained", [lambda: make_model("llama"), make_adapted], ids=["plain", "merged adapters"])
def test_a_server_of_vllm_gets_the_values_of_the_moment_and_one_parameter_at_a_time(
    tmp_path, make_trained, monkeypatch
):
    monkeypatch.setattr(vllm_generation, "is_vllm_available", lambda: True)
    monkeypatch.setattr(vllm_generation, "VLLMClient", FakeClient)
    served = {"num_generations": 2, "max_completion_length": 4, "use_vllm": True, "vllm_mode": "server"}
    trainers, syncs = [], []
    for classes in GRPO:
        given = {"reward_funcs": count_sevens}
        trainers.append(train(classes, tmp_path, prompts(), make_trained(), given, **served))
        client = FakeClient.made[0]
        syncs.append(client.syncs)
        assert client.resets == len(client.syncs) == trainers[-1].state.max_steps
        for metadata, got in zip(client.announced, client.syncs, strict=True):
            assert [(name, str(t.dtype).removeprefix("torch."), list(t.shape)) for name, t in got.items()] == metadata
    assert_trained_the_same(*trainers)
    # The last of one round is in use while PEFT takes the adapters out again, and stays until the model is used.
    assert 0 < max(FakeClient.made[0].held) <= largest(make_model("llama"), 3 if make_trained is make_adapted else 2)
    for left, right in zip(*syncs, strict=True):
        assert left.keys() == right.keys() == dict(make_model("llama").named_parameters()).keys()
        for name, value in left.items():
            assert torch.equal(value, right[name]), name
