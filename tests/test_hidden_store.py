"""The hidden store: content keys, atomic files, and damage that is found."""

import pytest
import torch

from eaglet.digests import file_sha256, hidden_key
from eaglet.errors import StoreError
from eaglet.hidden_store import HiddenStore, bytes_per_token

FINGERPRINT, LAYERS, H = "f" * 64, [2, 4, 5], 16


def a_row(tokens=7, dtype="bfloat16", seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 100, (tokens,), generator=generator).tolist()
    aux, last = torch.randn(tokens, 3 * H, generator=generator), torch.randn(tokens, H, generator=generator)
    metadata = {"fingerprint": FINGERPRINT, "layers": LAYERS, "dtype": dtype}
    return hidden_key(FINGERPRINT, LAYERS, dtype, ids), ids, aux, last, metadata


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_row_is_read_as_it_was_written(tmp_path, dtype):
    store, row = HiddenStore(tmp_path), a_row(dtype=dtype)
    store.write(*row)
    read = store.read(row[0])
    stored = getattr(torch, dtype)
    assert read.token_ids.tolist() == row[1] and read.token_ids.dtype == torch.int32
    assert torch.equal(read.aux, row[2].to(stored)) and torch.equal(read.last, row[3].to(stored))
    assert read.metadata["last"] == "after_final_norm" and read.metadata["layers"] == LAYERS


def test_float8_keeps_each_layer_within_its_own_scale(tmp_path):
    store = HiddenStore(tmp_path)
    key, ids, aux, last, metadata = a_row(dtype="float8_e4m3fn")
    aux[:, H : 2 * H] *= 1e4  # one layer's outliers must not flatten the others
    store.write(key, ids, aux, last, metadata)
    read = store.read(key)
    assert read.aux.dtype == torch.bfloat16
    for part in range(3):
        wanted, found = (x[:, part * H : (part + 1) * H].float() for x in (aux, read.aux))
        assert (wanted - found).abs().max() <= 0.07 * wanted.abs().max()  # e4m3: three bits of mantissa


def test_the_same_row_gives_the_same_bytes(tmp_path):
    digests = [HiddenStore(tmp_path / name).write(*a_row()) for name in "ab"]
    assert digests[0] == digests[1] == file_sha256(HiddenStore(tmp_path / "a").path(a_row()[0]))


def test_a_key_that_does_not_belong_to_the_tokens_is_refused(tmp_path):
    key, ids, aux, last, metadata = a_row()
    with pytest.raises(StoreError, match="belongs under the key"):
        HiddenStore(tmp_path).write("0" * 64, ids, aux, last, metadata)
    with pytest.raises(StoreError, match=r"expected \[T\]"):
        HiddenStore(tmp_path).write(key, ids[:-1], aux, last, metadata)


def test_any_flipped_byte_is_found(tmp_path):
    store = HiddenStore(tmp_path)
    key = a_row()[0]
    store.write(*a_row())
    store.verify(key)
    whole = store.path(key).read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    for place in [*range(header), *range(header, len(whole), 37), len(whole) - 1]:
        damaged = bytearray(whole)
        damaged[place] ^= 1
        store.path(key).write_bytes(damaged)
        with pytest.raises(StoreError, match=key):
            store.verify(key)


def test_a_missing_and_a_cut_file_say_what_to_do(tmp_path):
    store, (key, *row) = HiddenStore(tmp_path), a_row()
    with pytest.raises(StoreError, match="run hidden_states again"):
        store.read(key)
    store.write(key, *row)
    whole = store.path(key).read_bytes()
    store.path(key).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(StoreError, match="damaged"):
        store.read(key)


def test_the_estimate_is_the_size_of_the_data(tmp_path):
    for dtype in ("bfloat16", "float8_e4m3fn"):
        store, row = HiddenStore(tmp_path), a_row(tokens=500, dtype=dtype)
        store.write(*row)
        assert 0 <= store.path(row[0]).stat().st_size - 500 * bytes_per_token(H, dtype) < 1000


def test_keys_lists_what_is_stored(tmp_path):
    store, rows = HiddenStore(tmp_path), [a_row(seed=seed) for seed in range(3)]
    assert not list(store.keys())
    for row in rows:
        store.write(*row)
    assert list(store.keys()) == sorted(row[0] for row in rows)
