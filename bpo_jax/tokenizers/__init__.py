"""Tokenizers: text to token ids and back, behind one Protocol.

A word tokenizer gives every word of a fixed vocabulary one id, which is all
that a small policy on a text game needs. A byte tokenizer reads any text with
few ids. A Hugging Face tokenizer is the one that a language model came with.

The latter two tell text from structure: spelling a special token in a text is
not drawing it. What an environment says is encoded as text, whatever it says;
only a chat template's own words are read with `parse_special`.
"""

from bpo_jax.tokenizers.base import check_fits
from bpo_jax.tokenizers.base import TextStream
from bpo_jax.tokenizers.base import TextTokenizer
from bpo_jax.tokenizers.base import Tokenizer
from bpo_jax.tokenizers.base import whitespace
from bpo_jax.tokenizers.byte import ByteTokenizer
from bpo_jax.tokenizers.byte_level import write_json
from bpo_jax.tokenizers.hugging_face import HfTokenizer
from bpo_jax.tokenizers.hugging_face import load
from bpo_jax.tokenizers.words import PAD
from bpo_jax.tokenizers.words import UNKNOWN
from bpo_jax.tokenizers.words import WordTokenizer
