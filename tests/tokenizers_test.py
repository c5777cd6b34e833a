"""Tests of the tokenizers: of words, of bytes and of Hugging Face."""

import inspect
import json
import sys
import unicodedata

from bpo_jax import tokenizers
import numpy as np
import pytest
import tiny_tokenizers

_PRE = ('gpt-2', 'smollm', 'qwen2', 'llama-bpe')
_WORDS = ['open', 'drawer', '1', 'Ärger', 'go to']


@pytest.mark.parametrize('num_words', [0, 1, 29, 30, 31, 62, 63])
def test_round_trip_and_size(num_words):
  words = [f'word{i}' for i in range(num_words)]
  tokenizer = tokenizers.WordTokenizer(words)
  ids = tokenizer.encode(words)
  assert ids == list(range(2, num_words + 2))
  assert tokenizer.decode(ids) == words
  size = tokenizer.vocab_size
  assert size % 32 == 0 and num_words + 2 <= size < num_words + 2 + 32
  assert not tokenizer.unknown


def test_specials_come_first():
  tokenizer = tokenizers.WordTokenizer(_WORDS)
  assert tokenizer.decode([tokenizer.pad_id, tokenizer.unknown_id]) == [
      '<pad>', '<unk>']
  assert (tokenizer.pad_id, tokenizer.unknown_id) == (0, 1)


def test_unknown_words_are_counted_and_warned_of_once(caplog):
  tokenizer = tokenizers.WordTokenizer(_WORDS)
  ids = tokenizer.encode(['fridge', 'open', 'fridge', 'Open'])
  assert ids == [1, 2, 1, 1]
  assert tokenizer.unknown == {'fridge': 2, 'Open': 1}
  assert [r.getMessage() for r in caplog.records] == [
      "Word 'fridge' is not in the vocabulary.",
      "Word 'Open' is not in the vocabulary."]


def test_ids_beyond_the_words():
  tokenizer = tokenizers.WordTokenizer(_WORDS)
  assert tokenizer.decode([7, 31]) == ['<unk>', '<unk>']
  for wrong in (-1, 32):
    with pytest.raises(ValueError, match=rf'\[0, 32\), got {wrong}'):
      tokenizer.decode([wrong])


@pytest.mark.parametrize('vocabulary, match', [
    (['a', 'b', 'a'], "'a'.* twice"),
    (['a', '<pad>'], '<pad>'),
    (['a', ''], 'non-empty words'),
    (['a', 3], 'non-empty words'),
    ('abc', 'sequence of non-empty words'),
])
def test_refuses_a_vocabulary(vocabulary, match):
  with pytest.raises(ValueError, match=match):
    tokenizers.WordTokenizer(vocabulary)


def test_refuses_a_string_for_words():
  with pytest.raises(ValueError, match='split it first'):
    tokenizers.WordTokenizer(_WORDS).encode('open')


def test_json_round_trip():
  tokenizer = tokenizers.WordTokenizer(_WORDS)
  text = json.dumps(tokenizer.to_dict())
  again = tokenizers.WordTokenizer.from_dict(json.loads(text))
  assert again.vocabulary == tokenizer.vocabulary == tuple(_WORDS)
  assert again.fingerprint() == tokenizer.fingerprint()


def test_fingerprint_tells_order_and_boundaries():
  prints = {
      tokenizers.WordTokenizer(words).fingerprint()
      for words in (['a', 'b'], ['b', 'a'], ['ab'], ['a b'], ['a'], [])
  }
  assert len(prints) == 6


@pytest.mark.parametrize('change, match', [
    ({'vocabulary': ['drawer', 'open']}, 'order were changed'),
    ({'kind': 'byte'}, "kind 'word', got 'byte'"),
])
def test_from_dict_refuses(change, match):
  values = tokenizers.WordTokenizer(['open', 'drawer']).to_dict()
  with pytest.raises(ValueError, match=match):
    tokenizers.WordTokenizer.from_dict(values | change)


# Text.
_TEXTS = [
    '', 'open the drawer 1', '  two\n\n\nlines  ', 'Ünïcode 漢字 🙂 e\u0300',
    '<|im_end|>', 'a<|im_end|><|im_start|>user\nb', '<|im_end', "it's 123 34",
]


@pytest.fixture(scope='module', params=['byte', *_PRE])
def text_tokenizer(request, tmp_path_factory):
  if request.param == 'byte':
    return tokenizers.ByteTokenizer(tiny_tokenizers.CHATML[::-1])
  pytest.importorskip('tokenizers')
  folder = tmp_path_factory.mktemp(request.param)
  tiny_tokenizers.write(folder, pre=request.param, eos_token='<|im_end|>')
  return tokenizers.load(folder)


def _special(tokenizer, text):
  id_, = tokenizer.encode(text, parse_special=True)
  return id_


@pytest.mark.parametrize('text', _TEXTS)
def test_text_round_trip(text_tokenizer, text):
  expected = text
  if getattr(text_tokenizer, 'source', '').find('qwen2') > 0:
    expected = unicodedata.normalize('NFC', text)
  for parse_special in (False, True):
    ids = text_tokenizer.encode(text, parse_special=parse_special)
    assert text_tokenizer.decode(ids) == expected
    assert all(0 <= i < text_tokenizer.vocab_size for i in ids)


@pytest.mark.parametrize('text', _TEXTS)
def test_a_text_spells_no_special_token(text_tokenizer, text):
  assert not text_tokenizer.special_ids.intersection(
      text_tokenizer.encode(text))
  parsed = text_tokenizer.encode(text, parse_special=True)
  count = text.count('<|im_end|>') + text.count('<|im_start|>')
  assert sum(i in text_tokenizer.special_ids for i in parsed) == count


@pytest.mark.parametrize('text', _TEXTS)
def test_split_is_what_parsing_finds(text_tokenizer, text):
  parts = text_tokenizer.split(text)
  again = [text_tokenizer.decode([p]) if isinstance(p, int) else p
           for p in parts]
  assert ''.join(again) == text
  ids = [i for p in parts
         for i in ([p] if isinstance(p, int) else text_tokenizer.encode(p))]
  assert ids == text_tokenizer.encode(text, parse_special=True)


def test_words_are_joined_by_spaces(text_tokenizer):
  assert (text_tokenizer.encode(['open', 'the', 'drawer'])
          == text_tokenizer.encode('open the drawer'))


def test_white_space_alone_is_told(text_tokenizer):
  found = tokenizers.whitespace(text_tokenizer)
  assert found.shape == (text_tokenizer.vocab_size,) and found.dtype == bool
  alone = lambda text: found[text_tokenizer.encode(text)].all()
  assert all(map(alone, (' ', '\n', '\t', ' \n\n')))
  for text in ('the', 'x', '<|im_end|>', ' O'):
    assert not found[text_tokenizer.encode(text)[-1]]
  assert not found[list(text_tokenizer.special_ids)].any()
  words = tokenizers.WordTokenizer(['open', 'door'])
  assert not tokenizers.whitespace(words).any()


def test_half_a_surrogate_pair_is_encoded(text_tokenizer):
  assert text_tokenizer.decode(text_tokenizer.encode('a\ud800b')) == 'a?b'


def test_a_stream_gives_whole_characters(text_tokenizer):
  text = 'a漢🙂é<|im_end|>'
  stream = tokenizers.TextStream(text_tokenizer)
  ids = text_tokenizer.encode(text, parse_special=True)
  parts = [stream.push(id_) for id_ in ids]
  assert ''.join(parts) == text and stream.finish() == ''
  assert '\ufffd' not in ''.join(parts)
  assert any(not part for part in parts)  # A character spans several tokens.


def test_a_stream_of_any_tokens_is_their_text(text_tokenizer):
  rng = np.random.default_rng(0)
  for _ in range(50):
    ids = rng.integers(0, text_tokenizer.vocab_size + 9, 20).tolist()
    stream = tokenizers.TextStream(text_tokenizer)
    text = ''.join(map(stream.push, ids)) + stream.finish()
    assert text == text_tokenizer.decode(ids)


def test_what_is_no_id_is_refused(text_tokenizer):
  for wrong in (-2, 2**31):
    with pytest.raises(ValueError, match=rf'from 0 .*got \[{wrong}\]'):
      text_tokenizer.decode([1, wrong])


def test_ends_and_facts(text_tokenizer):
  assert text_tokenizer.eos_ids == (_special(text_tokenizer, '<|im_end|>'),)
  facts = text_tokenizer.to_dict()
  assert json.loads(json.dumps(facts)) == facts
  assert facts['fingerprint'] == text_tokenizer.fingerprint()


@pytest.mark.parametrize('special', [(), 'abc', ('a', 'a'), ('',)])
def test_a_byte_tokenizer_refuses(special):
  with pytest.raises(ValueError):
    tokenizers.ByteTokenizer(special)


def test_byte_ids():
  tokenizer = tokenizers.ByteTokenizer(('<end>', '<end>x'))
  assert tokenizer.encode('\0\xff') == [3, 3 + 0xc3, 3 + 0xbf]
  assert tokenizer.encode('<end>x<end>', parse_special=True) == [2, 1]
  assert tokenizer.vocab_size == 288 and tokenizer.pad_id == 0


# A model directory.
@pytest.fixture
def folder(tmp_path):
  pytest.importorskip('tokenizers')
  return tiny_tokenizers.write(tmp_path)


def _id(token):
  tokens, _, _ = tiny_tokenizers.vocabulary()
  return tokens.index(token)


def _added(content, **more):
  return {'content': content, 'lstrip': False, 'rstrip': False,
          'normalized': False, 'single_word': False, **more}


@pytest.mark.parametrize('token', [
    '<|im_end|>', _added('<|im_end|>'), _added('<|im_end|>', special=True),
    _added('<|im_end|>', __type='AddedToken'),
])
@pytest.mark.parametrize('file', [
    'tokenizer_config.json', 'special_tokens_map.json'])
def test_named_tokens_in_every_spelling(folder, token, file):
  values = {'eos_token': token, 'bos_token': None, 'pad_token': '<|endoftext|>'}
  (folder / file).write_text(json.dumps(values))
  tokenizer = tokenizers.load(folder)
  assert tokenizer.eos_ids == (_id('<|im_end|>'),)
  assert tokenizer.bos_id is None
  assert tokenizer.pad_id == _id('<|endoftext|>')
  assert tokenizer.special_tokens == {
      'eos_token': '<|im_end|>', 'pad_token': '<|endoftext|>'}


def test_the_older_map_is_read_where_there_is_no_newer_table(folder):
  older = {'eos_token': '<|im_end|>'}
  (folder / 'special_tokens_map.json').write_text(json.dumps(older))
  newer = {'eos_token': '<|endoftext|>'}
  tiny_tokenizers.write_settings(folder, **newer)
  assert tokenizers.load(folder).special_tokens == older
  tiny_tokenizers.write_settings(folder, **newer, added_tokens_decoder={})
  assert tokenizers.load(folder).special_tokens == newer


@pytest.mark.parametrize('settings', [
    {'extra_special_tokens': ['<s>']}, {'additional_special_tokens': ['<s>']},
    {'extra_special_tokens': {'image_token': '<s>'}}, {'image_token': '<s>'},
    {'additional_special_tokens': [_added('<s>')]}, {'unk_token': '<s>'},
    {'added_tokens_decoder': {'300': _added('<s>', special=True)}},
])
def test_tokens_that_the_settings_call_special(tmp_path, settings):
  pytest.importorskip('tokenizers')
  tokens, merges, types = tiny_tokenizers.vocabulary(('<s>',))
  assert tokens.index('<s>') == 300
  for type_ in (1, 4):  # A plain token, and one that is added.
    types[-1] = type_
    tokenizers.write_json(tmp_path / 'tokenizer.json', tokens, merges, types)
    tiny_tokenizers.write_settings(tmp_path)
    assert 300 not in tokenizers.load(tmp_path).special_ids
    tiny_tokenizers.write_settings(tmp_path, **settings)
    tokenizer = tokenizers.load(tmp_path)
    assert 300 in tokenizer.special_ids
    assert 300 not in tokenizer.encode('a<s>')
    assert 300 in tokenizer.encode('a<s>', parse_special=True)


def test_a_token_that_only_the_settings_add(folder):
  size = tokenizers.load(folder).vocab_size
  entry = {str(size): _added('<tool>', special=True)}
  tiny_tokenizers.write_settings(folder, added_tokens_decoder=entry)
  tokenizer = tokenizers.load(folder)
  assert tokenizer.vocab_size == size + 1
  assert tokenizer.encode('<tool>', parse_special=True) == [size]
  entry = {str(size + 5): _added('<tool>')}
  tiny_tokenizers.write_settings(folder, added_tokens_decoder=entry)
  with pytest.raises(ValueError, match=f"'<tool>' to have id {size + 5}"):
    tokenizers.load(folder)


def test_a_token_that_is_added_but_may_stand_in_a_text(tmp_path):
  pytest.importorskip('tokenizers')
  tokens, merges, types = tiny_tokenizers.vocabulary(('<think>',))
  types[-1] = 4
  tokenizers.write_json(tmp_path / 'tokenizer.json', tokens, merges, types)
  tokenizer = tokenizers.load(tmp_path)
  assert not tokenizer.special_ids
  assert tokenizer.encode('<think>') == [len(tokens) - 1]


@pytest.mark.parametrize('file', ['generation_config.json', 'config.json'])
@pytest.mark.parametrize('value, expected', [
    (5, (5,)), ([5, 7], (5, 7)), (None, ()), ([], ()), (-1, ())])
def test_ids_of_the_model_settings(folder, file, value, expected):
  (folder / file).write_text(json.dumps({
      'eos_token_id': value, 'bos_token_id': 3, 'pad_token_id': 4}))
  tokenizer = tokenizers.load(folder)
  assert tokenizer.eos_ids == expected
  assert (tokenizer.bos_id, tokenizer.pad_id) == (3, 4)


def test_the_tokenizers_own_end_comes_first_and_once(folder):
  end = _id('<|im_end|>')
  tiny_tokenizers.write_settings(folder, eos_token='<|im_end|>')
  (folder / 'generation_config.json').write_text(
      json.dumps({'eos_token_id': [7, end]}))
  (folder / 'config.json').write_text(json.dumps({'eos_token_id': 8}))
  tokenizer = tokenizers.load(folder)
  assert tokenizer.eos_ids == (end, 7)
  assert tokenizer.pad_id == end


def test_nothing_is_cut_padded_or_dropped(folder):
  text = 'open the drawer 123 ' * 20
  expected = tokenizers.load(folder).encode(text)
  path = folder / 'tokenizer.json'
  values = json.loads(path.read_text())
  values['truncation'] = {'direction': 'Right', 'max_length': 5,
                          'strategy': 'LongestFirst', 'stride': 0}
  values['padding'] = {'strategy': {'Fixed': 999}, 'direction': 'Right',
                       'pad_to_multiple_of': None, 'pad_id': 0,
                       'pad_type_id': 0, 'pad_token': '!'}
  values['model']['dropout'] = 0.9
  path.write_text(json.dumps(values))
  assert tokenizers.load(folder).encode(text) == expected


def test_add_special_puts_a_beginning(tmp_path):
  pytest.importorskip('tokenizers')
  tokens, merges, types = tiny_tokenizers.vocabulary(tiny_tokenizers.LLAMA)
  bos = tokens.index('<|begin_of_text|>')
  tokenizers.write_json(tmp_path / 'tokenizer.json', tokens, merges, types,
                        pre='llama-bpe', bos_id=bos)
  tokenizer = tokenizers.load(tmp_path)
  assert tokenizer.encode('a', add_special=True) == [bos, tokens.index('a')]
  assert tokenizer.encode('a') == [tokens.index('a')]


@pytest.mark.parametrize('pre, digits', [
    ('gpt-2', ['123', '34']), ('smollm', list('12334')),
    ('qwen2', list('12334')), ('llama-bpe', ['123', '34'])])
def test_families_cut_digits_differently(tmp_path, pre, digits):
  pytest.importorskip('tokenizers')
  tokenizer = tokenizers.load(tiny_tokenizers.write(tmp_path, pre=pre))
  assert [tokenizer.decode([i]) for i in tokenizer.encode('12334')] == digits


@pytest.mark.parametrize('pre, whole', [('qwen2', False), ('llama-bpe', True)])
def test_llama_takes_a_known_word_whole(tmp_path, pre, whole):
  pytest.importorskip('tokenizers')
  tokens, merges, _ = tiny_tokenizers.vocabulary(('zebra',))
  tokenizers.write_json(tmp_path / 'tokenizer.json', tokens, merges, pre=pre)
  ids = tokenizers.load(tmp_path).encode('zebra')
  assert (ids == [tokens.index('zebra')]) == whole


def test_fingerprints_tell_tokenizers_apart(tmp_path):
  pytest.importorskip('tokenizers')
  folders = [
      tiny_tokenizers.write(tmp_path / 'a', pre='qwen2'),
      tiny_tokenizers.write(tmp_path / 'b', pre='gpt-2'),
      tiny_tokenizers.write(tmp_path / 'c', ('<|im_end|>', '<s>')),
      tiny_tokenizers.write(tmp_path / 'd', eos_token='<|im_end|>'),
  ]
  prints = {tokenizers.load(f).fingerprint() for f in folders}
  prints.add(tokenizers.ByteTokenizer().fingerprint())
  prints.add(tokenizers.ByteTokenizer(('<s>',)).fingerprint())
  assert len(prints) == 6
  assert tokenizers.load(folders[0]).fingerprint() in prints


def test_a_tokenizer_larger_than_the_embedding_is_refused(folder):
  tokenizer = tokenizers.load(folder)
  tokenizers.check_fits(tokenizer, tokenizer.vocab_size)
  match = rf'tokenizer\.json: expected ids below 99, .*{tokenizer.vocab_size-1}'
  with pytest.raises(ValueError, match=match):
    tokenizers.check_fits(tokenizer, 99)
  with pytest.raises(ValueError, match='ByteTokenizer: .* below 287'):
    tokenizers.check_fits(tokenizers.ByteTokenizer(), 287)


@pytest.mark.parametrize('file, text, match', [
    ('tokenizer.json', None, r'tokenizer\.json: .*the directory has'),
    ('tokenizer.json', '{', r'tokenizer\.json: expected a JSON file'),
    ('tokenizer.json', '[' * 100_000, r'tokenizer\.json: expected a JSON file'),
    ('tokenizer.json', '[]', r'tokenizer\.json: .*object, got a list'),
    ('tokenizer.json', '{}', r'tokenizer\.json: .*library reads'),
    ('tokenizer.json', '{"added_tokens": [3]}', r'tokenizer\.json: .*got 3'),
    ('tokenizer.json', '{"added_tokens": 3}', r'tokenizer\.json: .*got 3'),
    ('tokenizer.json', '{"added_tokens": [{"content": "a"}]}',
     r'tokenizer\.json: .*id'),
    ('tokenizer.json', '{"model": 3}', r'tokenizer\.json: model: .*got 3'),
    ('tokenizer.json', '{"decoder": 3}', r'tokenizer\.json: decoder: .*got 3'),
    ('tokenizer.json',
     '{"model": {"type": "BPE", "continuing_subword_prefix": "x"}}',
     r"tokenizer\.json: model: .*prefix, got 'x'"),
    ('tokenizer_config.json', '{"eos_token": 3}', 'eos_token: .*got 3'),
    ('tokenizer_config.json', '{"eos_token": {}}', 'eos_token: .*got {}'),
    ('tokenizer_config.json', '{"eos_token": "<eos>"}',
     r"tokenizer\.json: expected eos_token '<eos>'.* is not there"),
    ('tokenizer_config.json', '{"extra_special_tokens": 3}',
     'extra_special_tokens: .*got 3'),
    ('tokenizer_config.json', '{"added_tokens_decoder": 3}',
     'added_tokens_decoder: .*got 3'),
    ('tokenizer_config.json', '{"added_tokens_decoder": {"a": 3}}', 'got 3'),
    ('tokenizer_config.json', '\xff', r'tokenizer_config\.json: .*JSON file'),
    ('generation_config.json', '{"eos_token_id": "a"}',
     "eos_token_id: .*got 'a'"),
    ('generation_config.json', '{"eos_token_id": [true]}', r'got \[True\]'),
    ('generation_config.json', '{"eos_token_id": 99999}',
     'a token of id 99999, .*eos_token_id; there is none'),
    ('config.json', '{"eos_token_id": 9999999999999}',
     'a token of id 9999999999999, '),
])
def test_a_wrong_file_is_named(folder, file, text, match):
  if text is None:
    (folder / file).unlink()
  else:
    (folder / file).write_bytes(text.encode('latin-1'))
  with pytest.raises(ValueError, match=match):
    tokenizers.load(folder)


def test_a_directory_that_is_not_there(tmp_path):
  with pytest.raises(ValueError, match=r'away.tokenizer\.json'):
    tokenizers.load(tmp_path / 'away')


@pytest.mark.parametrize('change, match', [
    ({'pre': 'gpt2'}, 'did you mean gpt-2'),
    ({'token_types': [1]}, '1 types of 3 tokens'),
    ({'tokens': ['a', 'b', 'a']}, '2 of them distinct'),
])
def test_write_json_refuses(tmp_path, change, match):
  values = {'tokens': ['a', 'b', 'c'], 'merges': []} | change
  with pytest.raises(ValueError, match=match):
    tokenizers.write_json(tmp_path / 'tokenizer.json', **values)


def test_tokens_that_are_no_bytes(folder):
  path = folder / 'tokenizer.json'
  values = json.loads(path.read_text()) | {'decoder': {'type': 'Fuse'}}
  path.write_text(json.dumps(values))
  with pytest.raises(ValueError, match='type ByteLevel, .*got Fuse'):
    tokenizers.load(folder).token_bytes(3)


def test_without_the_library_the_extra_is_named(folder, monkeypatch):
  monkeypatch.setitem(sys.modules, 'tokenizers', None)
  with pytest.raises(ImportError, match=r'bpo-jax\[hf\]'):
    tokenizers.load(folder)


# Peers: transformers builds the same families from the same vocabulary.
@pytest.mark.parametrize('pre, family', [
    ('qwen2', 'Qwen2Tokenizer'), ('gpt-2', 'GPT2Tokenizer')])
def test_families_are_as_in_transformers(tmp_path, pre, family):
  transformers = pytest.importorskip('transformers')
  tokens, merges, _ = tiny_tokenizers.vocabulary()
  peer = getattr(transformers, family)(
      vocab={token: id_ for id_, token in enumerate(tokens)},
      merges=[tuple(merge.split(' ')) for merge in merges])
  tokenizer = tokenizers.load(tiny_tokenizers.write(tmp_path, pre=pre))
  for text in _random_texts(300):
    assert tokenizer.encode(text) == peer.encode(text), text


def test_llama_is_as_in_transformers(tmp_path):
  slow = pytest.importorskip('transformers.convert_slow_tokenizer')
  signature = inspect.signature(slow.TikTokenConverter.__init__)
  pattern = signature.parameters['pattern'].default
  tokenizers.write_json(tmp_path / 'tokenizer.json', ['a'], [], pre='llama-bpe')
  values = json.loads((tmp_path / 'tokenizer.json').read_text())
  split, _ = values['pre_tokenizer']['pretokenizers']
  assert split['pattern'] == {'Regex': pattern}


def test_a_directory_is_read_as_transformers_reads_it(tmp_path):
  transformers = pytest.importorskip('transformers')
  folder = tiny_tokenizers.write(
      tmp_path, eos_token='<|im_end|>', pad_token='<|endoftext|>',
      tokenizer_class='PreTrainedTokenizerFast')
  peer = transformers.AutoTokenizer.from_pretrained(folder)
  peer.save_pretrained(tmp_path / 'again')
  for path in (folder, tmp_path / 'again'):
    tokenizer = tokenizers.load(path)
    assert tokenizer.eos_ids == (peer.eos_token_id,)
    assert tokenizer.pad_id == peer.pad_token_id
    assert tokenizer.special_tokens == peer.special_tokens_map
    for text in _random_texts(300):
      ids = tokenizer.encode(text, parse_special=True)
      assert ids == peer.encode(text)
      assert tokenizer.decode(ids) == peer.decode(ids)


def _random_texts(count):
  rng = np.random.default_rng(0)
  parts = ['open', ' the', ' drawer', '123', '4', ' ', '\n', '\t', "'s", "'LL",
           'é', 'e\u0300', '漢字', '🙂', '<|im_end|>', '<|', '.', '...', '_',
           '\u00a0', '²', '½', '٣', '\r\n', ' The', 'user']
  for _ in range(count):
    yield ''.join(rng.choice(parts, rng.integers(0, 9)))
