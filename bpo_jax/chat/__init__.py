"""Chat templates, and the turns of a conversation as tokens."""

from bpo_jax.chat.templates import Limits
from bpo_jax.chat.templates import load_template
from bpo_jax.chat.templates import render
from bpo_jax.chat.templates import Template
from bpo_jax.chat.turns import Turns
