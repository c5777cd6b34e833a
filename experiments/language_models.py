"""Agents that are language models: the files, the conversation, the weights."""

from collections.abc import Iterator
import contextlib
import dataclasses
import hashlib
import pathlib
from typing import Any

from absl import logging
import jax
import numpy as np

from bpo_jax import chat
from bpo_jax import tokenizers
from bpo_jax import types
from bpo_jax.models import gguf
from bpo_jax.models import hugging_face
from bpo_jax.models import lora
from bpo_jax.models import transformer
from environments import chat_codec
from experiments import configs

SMOLLM2 = 'smollm2'  # Stands for the weights of an installed package.
_LETTERS = 16  # Of a fingerprint.
# What the library advises, and the flag that does it.
_FLAGS = {
    "altered_replies='keep'": '--altered_replies=keep',
    "`now`, such as now='2024-07-26'": '--chat_date=2024-07-26',
}


@dataclasses.dataclass(frozen=True)
class LanguageModel:
  """A model directory, checked, with its weights still on disk.

  Attributes:
    directory: in Hugging Face's layout.
    config: of the network, adapters included.
    tokenizer: its own.
    conversation: what is said to it.
    turns: how its chat template frames that.
    template: the chat template.
    max_positions: tokens of the longest conversation that it was made for; None
      if it does not say.
  """

  directory: pathlib.Path
  config: transformer.TransformerConfig
  tokenizer: tokenizers.HfTokenizer
  conversation: chat_codec.Conversation
  turns: chat.Turns
  template: chat.Template
  max_positions: int | None

  def codec(self, config: configs.AgentConfig) -> chat_codec.ChatCodec:
    """Returns what puts an environment's text in its tokens."""
    return chat_codec.ChatCodec(
        self.conversation, self.turns, self.tokenizer,
        observation_length=config.chunk_length,
        action_length=config.action_length,
        max_commands=config.max_commands,
        constrained=config.constrained)

  def init_params(
      self, rng_key: jax.Array, device: jax.Device | None = None) -> dict:
    """Returns the weights, with fresh adapters where the config has them.

    Args:
      rng_key: of the adapters.
      device: where they come to rest; None for the default device.
    """
    there = contextlib.nullcontext() if device is None else (
        jax.default_device(device))
    with there:
      _, base = hugging_face.load(self.directory)
      if self.config.lora is None:
        return base
      return lora.init_params(self.config, base, rng_key)

  def origin(self, params: Any) -> dict[str, str]:
    """Returns what a run that begins here says in its checkpoints.

    Args:
      params: as by `init_params`, before anything was learnt.
    """
    text = self.template.text.encode('utf-8', 'surrogatepass')
    return {'base': fingerprint(params),
            'chat_template': hashlib.sha256(text).hexdigest()[:_LETTERS]}

  def check_origin(self, kept: dict[str, Any], own: dict[str, str],
                   workdir: pathlib.Path) -> None:
    """Raises ValueError if a checkpoint is of other weights or template.

    Args:
      kept: what it says, of older ones not all.
      own: as by `origin`.
      workdir: of the run that wrote it.
    """
    base, template = kept.get('base'), kept.get('chat_template')
    # Older ones say of whole weights what is said of none.
    if base not in (None, own['base'], fingerprint({})):
      raise ValueError(
          f'the checkpoint in {workdir} is of a run from another base model:'
          f' expected weights with the fingerprint {base}, got {own["base"]} in'
          f' {self.directory}; give the --model that it was trained from')
    if template not in (None, own['chat_template']):
      raise ValueError(
          f'{self.template.source}: the checkpoint in {workdir} was trained'
          f' with another chat template: expected the fingerprint {template},'
          f' got {own["chat_template"]}; put that template back, or give the'
          ' --model that it was trained from')


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
  with _errors_of(directory):
    return _open(config, directory)


@contextlib.contextmanager
def _errors_of(directory: pathlib.Path) -> Iterator[None]:
  """Lets errors name the directory, and the flags that help."""
  try:
    yield
  except ValueError as error:
    message = str(error)
    for advice, flag in _FLAGS.items():
      message = message.replace(advice, flag)
    if str(directory) not in message:
      message = f'{directory}: {message}'
    raise ValueError(message) from error


def _open(
    config: configs.AgentConfig, directory: pathlib.Path) -> LanguageModel:
  network = dataclasses.replace(
      hugging_face.read_config(directory), lora=config.lora,
      remat=config.remat, dtype=config.dtype)
  if config.constrained and network.vocab_size % types.WORD:
    raise ValueError(
        f'{directory / "config.json"}: vocab_size: expected a multiple of'
        f' {types.WORD} where actions are drawn among the admissible ones,'
        f' whose sets are words of that many bits, got {network.vocab_size};'
        ' pass --constrained=false, or pad the embedding')
  tokenizer = tokenizers.load(directory)
  tokenizers.check_fits(tokenizer, network.vocab_size)
  template = chat.load_template(directory)
  turns = chat.Turns.of(
      tokenizer, template, now=config.chat_date,
      altered_replies=config.altered_replies)
  _check_system(turns, config.system_prompt)
  conversation = chat_codec.Conversation(
      config.system_prompt, config.list_commands)
  return LanguageModel(
      directory, network, tokenizer, conversation, turns, template,
      hugging_face.max_positions(directory))


def _check_system(turns: chat.Turns, system: str | None) -> None:
  try:
    turns.opening(system, '')
  except ValueError as error:
    advice = 'give it one with --system_prompt=TEXT' if system is None else (
        'pass --system_prompt= to say none')
    raise ValueError(f'{error} For such a template {advice}.') from error


def _directory(model: str, cache: pathlib.Path) -> pathlib.Path:
  """Returns the Hugging Face directory of what --model names."""
  path = gguf.find_smollm2() if model == SMOLLM2 else pathlib.Path(model)
  if path.suffix.lower() != '.gguf':
    return path
  logging.info('Reading %s; the first time takes half a minute.', path)
  return gguf.cached_directory(path, cache / 'gguf', chat=True)


def fingerprint(params: Any) -> str:
  """Returns text that is equal for equal weights, adapters aside.

  Adapters mean nothing without the weights that they were trained beside. And
  whole weights are held to those that training began from, by KL for one.
  """
  _, frozen = lora.split(params)
  digest = hashlib.sha256()
  for path, leaf in sorted(
      (jax.tree_util.keystr(path), leaf)
      for path, leaf in jax.tree_util.tree_leaves_with_path(frozen or params)):
    digest.update(f'{path} {leaf.shape} {leaf.dtype}'.encode())
    digest.update(np.ascontiguousarray(leaf).data)
  return digest.hexdigest()[:_LETTERS]
