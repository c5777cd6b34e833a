"""A byte-level vocabulary small enough to write out, as a model directory."""

import json
import pathlib

from bpo_jax import tokenizers
from bpo_jax.tokenizers import byte_level

CHATML = ('<|endoftext|>', '<|im_start|>', '<|im_end|>')
LLAMA = ('<|begin_of_text|>', '<|end_of_text|>', '<|start_header_id|>',
         '<|end_header_id|>', '<|eot_id|>')
MERGES = (
    'Ċ Ċ,ĊĊ Ċ,Ġ Ġ,ĠĠ ĠĠ,h e,t he,Ġ the,i n,e r,u s,us er,s t,a s,as s,i st,a n,'
    "an t,ass ist,assist ant,n d,' s,. Ċ,< |,| >,i m,im _,1 2,12 3,3 4,Ġ a,o r,"
    'Ġ d,d r,Ġ O,p e,pe n,O pen,Ã ©,ð Ł,ðŁ Ļ,Ġ b,l o,lo o,loo k'
).split(',')


def vocabulary(special=CHATML) -> tuple[list[str], list[str], list[int]]:
  """Returns tokens, merges and types: of bytes, merged ones, special ones."""
  letters = sorted(byte_level.BYTE_OF, key=byte_level.BYTE_OF.get)
  merged = [merge.replace(' ', '') for merge in MERGES]
  tokens = [*letters, *merged, *special]
  types = [1] * (len(tokens) - len(special)) + [3] * len(special)
  return tokens, MERGES, types


def write(folder: pathlib.Path, special=CHATML, pre='qwen2', **settings):
  """Writes tokenizer.json and tokenizer_config.json; returns the directory."""
  folder.mkdir(exist_ok=True, parents=True)
  tokens, merges, types = vocabulary(special)
  tokenizers.write_json(folder / 'tokenizer.json', tokens, merges, types, pre)
  write_settings(folder, **settings)
  return folder


def write_settings(folder: pathlib.Path, **settings) -> None:
  """Writes tokenizer_config.json."""
  text = json.dumps(settings)
  (folder / 'tokenizer_config.json').write_text(text, encoding='utf-8')
