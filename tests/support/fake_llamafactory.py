"""What the plug-in for LLaMA-Factory needs of LLaMA-Factory 0.9.5, without it.

The names and the order of calls are those of these files of its wheel:

- ``llamafactory/v1/utils/plugin.py``: ``BasePlugin``, whose registry all kinds of plug-ins share
- ``llamafactory/v1/plugins/model_plugins/initialization.py``: ``InitPlugin``
- ``llamafactory/v1/plugins/trainer_plugins/distributed/hub.py``: ``DistributedPlugin``
- ``llamafactory/v1/plugins/trainer_plugins/optimizer.py``: ``OptimizerPlugin``
- ``llamafactory/v1/core/base_trainer.py``: ``BaseTrainer.__init__`` and ``fit``
- ``llamafactory/v1/trainers/sft_trainer.py``: ``run_sft``
"""

import importlib
import sys
import types

import torch


class PluginConfig(dict):
    @property
    def name(self):
        return self["name"]


class BasePlugin:
    registry = None  # by name, then by method

    def __init__(self, name=None):
        self.name = name

    def register(self, method_name="__call__"):
        def decorator(func):
            methods = self.registry.setdefault(self.name, {})
            assert method_name not in methods, f"{self.name} is registered twice"
            methods[method_name] = func
            return func

        return decorator

    def __call__(self, *args, **kwargs):
        return self.registry[self.name]["__call__"](*args, **kwargs)


class InitPlugin(BasePlugin):
    pass


class DistributedPlugin(BasePlugin):
    pass


class OptimizerPlugin(BasePlugin):
    pass


class BaseTrainer:
    """A trainer as far as plug-ins are concerned: it shards, makes the optimizer and the schedule, and trains."""

    def __init__(self, model, dist_config=None, optim_config=None, learning_rate=5e-3):
        model.gradient_checkpointing_enable({"use_reentrant": False})
        if dist_config is None:
            self.model = model
        else:
            self.model = DistributedPlugin(dist_config.name)(model, dist_config, bf16=False)
        if optim_config is None:
            trained = [p for p in self.model.parameters() if p.requires_grad]
            self.optimizer = torch.optim.AdamW(trained, lr=learning_rate)
        else:
            self.optimizer = OptimizerPlugin(optim_config.name)(self.model, optim_config)
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lr_lambda=lambda step: 1.0)
        self.losses, self.norms = [], []

    def fit(self, batches):
        self.model.train()
        for micro_batches in batches:
            for batch in micro_batches:
                loss = self.model(**batch).loss / len(micro_batches)
                loss.backward()
                self.losses.append(loss.item())
            self.norms.append(torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0).item())
            self.optimizer.step()
            self.lr_scheduler.step()
            self.optimizer.zero_grad()


def install(monkeypatch):
    """Puts all of it where the plug-in imports it from, for the length of a test, and imports the plug-in."""
    monkeypatch.setattr(BasePlugin, "registry", {})
    ran = []
    modules = {
        "llamafactory.v1.plugins.model_plugins.initialization": {"InitPlugin": InitPlugin},
        "llamafactory.v1.plugins.trainer_plugins.distributed.hub": {"DistributedPlugin": DistributedPlugin},
        "llamafactory.v1.plugins.trainer_plugins.optimizer": {"OptimizerPlugin": OptimizerPlugin},
        "llamafactory.v1.trainers.sft_trainer": {"run_sft": lambda: ran.append(sys.argv[1:])},
    }
    for path, names in modules.items():
        parts = path.split(".")
        for end in range(1, len(parts) + 1):
            name = ".".join(parts[:end])
            if name not in sys.modules or not hasattr(sys.modules[name], "is_fake"):
                monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
                sys.modules[name].is_fake = True
        vars(sys.modules[path]).update(names)
    # A plug-in that was imported with another registry must not stay.
    monkeypatch.delitem(sys.modules, "hf_patrickstar.integrations.llamafactory", raising=False)
    plugin = importlib.import_module("hf_patrickstar.integrations.llamafactory")
    monkeypatch.setitem(sys.modules, "hf_patrickstar.integrations.llamafactory", plugin)
    return plugin, ran
