"""What the plug-in for axolotl needs of axolotl 0.19.0, without axolotl.

The names, the signatures and the order of calls are those of these files of its wheel:

- ``axolotl/integrations/base.py``: ``BasePlugin``, ``PluginManager``
- ``axolotl/integrations/config.py``: ``merge_input_args``, ``merge_training_args``
- ``axolotl/utils/dict.py``: ``DictDefault``
- ``axolotl/utils/import_helper.py``: ``get_cls_from_module_str``
- ``axolotl/core/builders/causal.py``, ``rl.py``: ``_get_trainer_cls`` and ``build``
- ``axolotl/core/trainers``: the classes
"""

import dataclasses
import importlib
import sys
import types

from pydantic import BaseModel
from transformers import Trainer, TrainingArguments


class DictDefault(dict):
    """A dictionary whose keys are attributes; what is not there is ``None``."""

    __getattr__ = dict.get
    __setattr__ = dict.__setitem__

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        for key, value in self.items():
            if isinstance(value, dict):
                self[key] = DictDefault(value)

    def __missing__(self, key):
        return None


class BasePlugin:
    def __init__(self):
        """Plug-ins are made without arguments."""

    def get_input_args(self):
        return None

    def get_training_args_mixin(self):
        return None

    def pre_model_load(self, cfg: DictDefault):
        pass

    def get_trainer_cls(self, cfg: DictDefault):
        return None

    def post_trainer_create(self, cfg: DictDefault, trainer: Trainer):
        pass

    def get_training_args(self, cfg: DictDefault):
        return None


class PluginManager:
    _instance = None

    def __init__(self):
        self.plugins = {}

    @staticmethod
    def get_instance():
        if PluginManager._instance is None:
            PluginManager._instance = PluginManager()
        return PluginManager._instance

    def register(self, plugin_name):
        module_name, class_name = plugin_name.rsplit(".", 1)
        self.plugins[plugin_name] = getattr(importlib.import_module(module_name), class_name)()


class AxolotlTrainer(Trainer):
    pass


class AxolotlDPOTrainer(Trainer):
    pass


class AxolotlGRPOTrainer(Trainer):
    pass


class HFCausalTrainerBuilder:
    def __init__(self, cfg):
        self.cfg = cfg

    def _get_trainer_cls(self):
        if self.cfg.plugins:
            for plugin in PluginManager.get_instance().plugins.values():
                found = plugin.get_trainer_cls(self.cfg)
                if found is not None:
                    return found
        return AxolotlTrainer


class HFRLTrainerBuilder:
    def __init__(self, cfg, model=None):
        self.cfg, self.model, self.model_ref = cfg, model, None

    def _get_trainer_cls(self, trainer_kwargs: dict):
        if self.cfg.plugins:
            for plugin in PluginManager.get_instance().plugins.values():
                found = plugin.get_trainer_cls(self.cfg)
                if found is not None:
                    return found, []
        found = {"dpo": AxolotlDPOTrainer, "grpo": AxolotlGRPOTrainer}[self.cfg.rl]
        if self.cfg.trainer_cls:
            found = get_cls_from_module_str(self.cfg.trainer_cls)
        return found, [self.model]


def get_cls_from_module_str(module_str):
    path, name = module_str.rsplit(".", 1)
    return getattr(importlib.import_module(path), name)


class AxolotlInputConfigBase(BaseModel):
    base_model: str
    deepspeed: str | None = None


@dataclasses.dataclass
class AxolotlTrainingMixinsBase:
    sample_packing: bool = False


def merge_input_args():
    """The class of the YAML's keys: axolotl's own, then those of the plug-ins."""
    paths = [plugin.get_input_args() for plugin in PluginManager.get_instance().plugins.values()]
    found = tuple(get_cls_from_module_str(path) for path in paths if path is not None)
    return type("AxolotlInputConfig", (AxolotlInputConfigBase, *found), {})


def merge_training_args():
    """The class of training arguments: the mixins that are no dataclass together, before transformers' own."""
    paths = [plugin.get_training_args_mixin() for plugin in PluginManager.get_instance().plugins.values()]
    found = tuple(get_cls_from_module_str(path) for path in paths if path is not None)
    mixins = type("AxolotlTrainingMixins", (AxolotlTrainingMixinsBase, *found), {})
    return dataclasses.dataclass(type("AxolotlTrainingArguments", (mixins, TrainingArguments), {}))


def install(monkeypatch):
    """Puts all of it where the plug-in imports it from, for the length of a test."""
    this = sys.modules[__name__]
    modules = {
        "axolotl.integrations.base": ("BasePlugin", "PluginManager"),
        "axolotl.utils.dict": ("DictDefault",),
        "axolotl.core.builders.causal": ("HFCausalTrainerBuilder",),
        "axolotl.core.builders.rl": ("HFRLTrainerBuilder",),
        "axolotl.core.trainers": ("AxolotlTrainer", "AxolotlDPOTrainer"),
        "axolotl.core.trainers.grpo.trainer": ("AxolotlGRPOTrainer",),
    }
    for path, names in modules.items():
        parts = path.split(".")
        for end in range(1, len(parts) + 1):
            name = ".".join(parts[:end])
            if name not in sys.modules:
                monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
                if end > 1:
                    setattr(sys.modules[".".join(parts[: end - 1])], parts[end - 1], sys.modules[name])
        for name in names:
            setattr(sys.modules[path], name, getattr(this, name))
    monkeypatch.setattr(PluginManager, "_instance", None)
    # A plug-in that was imported with another axolotl, or with another of these, must not stay.
    monkeypatch.delitem(sys.modules, "hf_patrickstar.integrations.axolotl", raising=False)
    plugin = importlib.import_module("hf_patrickstar.integrations.axolotl")
    monkeypatch.setitem(sys.modules, "hf_patrickstar.integrations.axolotl", plugin)
    return plugin
