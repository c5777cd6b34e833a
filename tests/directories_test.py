"""Directories that are there whole or not at all."""

import os

import pytest

from bpo_jax.models import directories


def write(directory):
  with directories.whole(directory) as folder:
    (folder / 'file').write_text('text')


def everything(folder):
  return sorted(path.relative_to(folder).as_posix()
                for path in folder.rglob('*'))


def make_folder(folder):
  (folder / 'empty').mkdir()
  return folder / 'empty'


def make_dangling(folder):
  (folder / 'link').symlink_to(folder / 'nowhere' / 'yet')
  return folder / 'link'


def make_link(folder):
  (folder / 'link').symlink_to(make_folder(folder))
  return folder / 'link'


@pytest.mark.parametrize('make', [
    lambda folder: folder / 'free', lambda folder: folder / 'deep' / 'er',
    make_folder, make_dangling, make_link])
def test_a_path_that_leads_to_nothing_is_written(make, tmp_path):
  path = make(tmp_path)
  was_link, before = path.is_symlink(), everything(tmp_path)
  directories.check_writable(path)
  assert everything(tmp_path) == before
  write(path)
  assert (path / 'file').read_text() == 'text'
  assert path.is_symlink() == was_link
  assert not [name for name in everything(tmp_path) if '/.' in f'/{name}']


def make_file(folder):
  (folder / 'file').write_text('')
  return folder / 'file'


def make_loop(folder):
  (folder / 'loop').symlink_to(folder / 'loop')
  return folder / 'loop'


@pytest.mark.parametrize('make, message', [
    (lambda folder: make_file(folder).parent, 'one with something in it'),
    (make_file, 'got a file'),
    (make_loop, 'got a link to itself'),
    (lambda folder: make_file(folder) / 'a' / 'b', 'Not a directory on making'),
    (lambda folder: '/proc/x/y', 'on making /proc')])
def test_a_path_that_cannot_be_written_is_refused(make, message, tmp_path):
  path = make(tmp_path)
  before = everything(tmp_path)
  for refused in (directories.check_writable, write):
    with pytest.raises(ValueError, match=f'{path}: expected .*{message}'):
      refused(path)
    assert everything(tmp_path) == before


def test_what_is_not_finished_leaves_nothing(tmp_path):
  os.mkdir(tmp_path / 'there')
  with pytest.raises(KeyboardInterrupt):
    with directories.whole(tmp_path / 'there' / 'a' / 'b') as folder:
      (folder / 'half').write_text('')
      raise KeyboardInterrupt
  assert everything(tmp_path) == ['there']
