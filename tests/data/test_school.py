"""School: 139 clients from one MATLAB file, scaled by declared constants, checked by its md5."""

import numpy as np
import pytest
from scipy.io import loadmat, savemat

from sordino.data import SOURCES, get, load
from sordino.errors import BadInput, SordinoError
from sordino.study.file import read_study


def test_every_school_is_a_client_with_its_pupils(school_folder):
    data = load("school", school_folder)
    cells = loadmat(school_folder / "school" / "school.mat")
    clients = data.partition("natural", test=0.0)
    assert len(data) == SOURCES["school"].records == clients.sizes.sum()
    assert len(clients) == SOURCES["school"].clients == 139
    assert data.task == "regression"
    for k in (0, 5, 138):
        own = clients.train[k]
        order = np.argsort(own)  # a split shuffles
        raw = cells["X"][0, k].astype(np.float64)
        raw[:, [3, 4]] /= 100
        np.testing.assert_allclose(clients.x[own[order]], raw, atol=1e-6)
        np.testing.assert_allclose(clients.y[own[order]], cells["Y"][0, k].ravel() / 70, atol=1e-6)
    assert data.x.min() == 0.0
    assert data.x.max() == 1.0
    assert 0 < data.y.min() < data.y.max() == 1.0


def test_another_file_is_refused_and_the_way_to_it_is_told(tmp_path):
    with pytest.raises(BadInput, match=r"school\.mat is missing; put school\.mat from https://"):
        load("school", tmp_path)
    with pytest.raises(SordinoError, match="no package has school; by hand: put"):
        get("school", tmp_path)
    (tmp_path / "school").mkdir()
    savemat(tmp_path / "school" / "school.mat", {"X": np.zeros(3), "Y": np.zeros(3)})
    with pytest.raises(BadInput, match="has md5"):
        load("school", tmp_path)


def test_a_study_knows_its_clients_without_reading_them(tmp_path):
    written = tmp_path / "school.toml"
    written.write_text('[data]\nname = "school"\n[budgets]\nepsilon = 6.0\n', encoding="utf-8")
    names, sorted_files = read_study(written).data.expected_clients()
    assert names is not None
    assert len(names) == 139
    assert not sorted_files
    written.write_text('[data]\nname = "school"\nclients = 12\n[budgets]\nepsilon = 6.0\n', encoding="utf-8")
    with pytest.raises(BadInput, match="comes with 139 clients"):
        read_study(written).check()
