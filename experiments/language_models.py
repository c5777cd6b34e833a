"""Agents that are language models: the files, the conversation, the weights."""

import dataclasses
import hashlib
import pathlib
from typing import Any

from absl import logging
import jax
import numpy as np

from bpo_jax import chat
from bpo_jax import tokenizers
from bpo_jax.models import gguf
from bpo_jax.models import hugging_face
from bpo_jax.models import lora
from bpo_jax.models import transformer
from environments import chat_codec
from experiments import configs

SMOLLM2 = 'smollm2'  # Stands for the weights of an installed package.


@dataclasses.dataclass(frozen=True)
class LanguageModel:
  """A model directory, checked, with its weights still on disk.

  Attributes:
    directory: in Hugging Face's layout.
    config: of the network, adapters included.
    tokenizer: its own.
    conversation: what is said to it.
    turns: how its chat template frames that.
  """

  directory: pathlib.Path
  config: transformer.TransformerConfig
  tokenizer: tokenizers.HfTokenizer
  conversation: chat_codec.Conversation
  turns: chat.Turns

  def codec(self, config: configs.AgentConfig) -> chat_codec.ChatCodec:
    """Returns what puts an environment's text in its tokens."""
    return chat_codec.ChatCodec(
        self.conversation, self.turns, self.tokenizer,
        observation_length=config.chunk_length,
        action_length=config.action_length,
        max_commands=config.max_commands)

  def init_params(self, rng_key: jax.Array) -> dict:
    """Returns the weights, with fresh adapters where the config has them."""
    _, base = hugging_face.load(self.directory)
    if self.config.lora is None:
      return base
    return lora.init_params(self.config, base, rng_key)


def load(config: configs.AgentConfig, cache: pathlib.Path) -> LanguageModel:
  """Opens the model that a config names; reads all but its weights.

  Args:
    config: names it, with its adapters and what it is told.
    cache: where a GGUF file is unpacked.

  Raises:
    ImportError: if an extra that it needs is not installed.
    ValueError: if a file of it is not what it should be.
  """
  directory = _directory(config.model, cache)
  network = dataclasses.replace(
      hugging_face.read_config(directory), lora=config.lora,
      remat=config.remat, dtype=config.dtype)
  tokenizer = tokenizers.load(directory)
  tokenizers.check_fits(tokenizer, network.vocab_size)
  turns = chat.Turns.of(
      tokenizer, chat.load_template(directory), now=config.chat_date,
      altered_replies=config.altered_replies)
  conversation = chat_codec.Conversation(
      config.system_prompt, config.list_commands)
  return LanguageModel(directory, network, tokenizer, conversation, turns)


def _directory(model: str, cache: pathlib.Path) -> pathlib.Path:
  """Returns the Hugging Face directory of what --model names."""
  path = gguf.find_smollm2() if model == SMOLLM2 else pathlib.Path(model)
  if path.suffix != '.gguf':
    return path
  logging.info('Reading %s; the first time takes half a minute.', path)
  return gguf.cached_directory(path, cache / 'gguf')


def fingerprint(params: Any) -> str:
  """Returns text that is equal for equal frozen weights, of 16 letters.

  Adapters mean nothing without the weights that they were trained beside.
  """
  _, frozen = lora.split(params)
  digest = hashlib.sha256()
  for path, leaf in sorted(
      (jax.tree_util.keystr(path), leaf)
      for path, leaf in jax.tree_util.tree_leaves_with_path(frozen)):
    digest.update(f'{path} {leaf.shape} {leaf.dtype}'.encode())
    digest.update(np.ascontiguousarray(leaf).data)
  return digest.hexdigest()[:16]
