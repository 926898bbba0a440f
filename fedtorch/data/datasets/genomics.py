"""Breast cancer in The Cancer Genome Atlas: proteins and genes by tissue source site, survival by region.

The terms of the Genomic Data Commons hold for all of them: do not attempt to identify participants.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy
import torch

from fedtorch.data.datasets._frames import by_client, choose, read
from fedtorch.data.federated import FederatedData

if TYPE_CHECKING:
    import pandas

REGIONS = ("Northeast", "South", "West", "Midwest", "Europe", "Canada")  # in FLamby's order, 0 … 5


def tcpa_brca_rppa(
    proteins: Sequence[str] | None = None,
    minimum: int = 50,
    primary: bool = False,
    dtype: torch.dtype = torch.float32,
) -> FederatedData:
    """Load protein levels in breast cancer samples, by tissue source site.

    Rows x `(len(proteins),)`: level-4 normalised log expression of reverse-phase protein arrays. The sites, by
    their two-character TCGA codes, the largest first: with more than 50 samples BH 138, A2 91, D8 74, E2 71, AR
    66, E9 66 and A8 53.

    Source: Li et al. (2013), "TCPA: a resource for cancer functional proteomics data", Nature Methods 10, 1046
    (TCGA-BRCA-L4, TCGA v4.2); no licence stated.

    Args:
        proteins: by the name of the antibody in the file without its validation status, such as "LKB1", "p27_pT157",
            "E.Cadherin" (file: E.Cadherin.R.V_GBL1113286); default: the 217 of the 224 that were measured in every
            sample.
        minimum: sites with more samples than this are included.
        primary: whether to keep only samples of primary tumours (874 of the 901).
        dtype: of x.

    Raises:
        ValueError: unknown proteins, or missing measurements in a sample of one of the sites.
    """
    frame = read("tcpa_brca_rppa", "TCGA-BRCA-L4.csv")
    frame = frame.rename(columns=lambda name: re.sub(r"\.[A-Z]\.[A-Z]+_GBL\d+", "", name))
    available = list(frame.columns[4:])
    complete = [name for name in available if not frame[name].isna().any()]
    if primary:
        frame = frame[frame["Sample_Type"] == "Primary"]
    chosen = complete if proteins is None else choose("proteins", proteins, available)
    return _by_site(frame, "Sample_ID", chosen, minimum, dtype)


def tcga_brca_expression(
    genes: Sequence[str] | None = None, minimum: int = 0, dtype: torch.dtype = torch.float32
) -> FederatedData:
    """Load gene expression (RNA-seq) in 476 breast cancer tumours, by tissue source site.

    Rows x `(len(genes),)`: log-scale expression, 0 to 8.5, of genes of the KEGG pathway hsa05224. The sites, by
    their two-character TCGA codes, the largest first: BH 103, A8 69, A2 63, E2 46, B6 43, AN 36, AO 36, C8 27,
    AR 24, A7 11, D8 8, A1 7, AQ 3.

    Source: TCGA-BRCA as prepared by Zhang, Ou-Yang, Yan, Hu, Yan (2019), "A joint graphical model for inferring
    gene networks across multiple subpopulations and data types" (R package JEGN, GPL-2).

    Args:
        genes: by their symbols, such as "WNT1"; default: all 139.
        minimum: sites with more samples than this are included.
        dtype: of x.
    """
    frame = read("tcga_brca_expression", "tcga_brca_kegg05224_mrnaseq.csv")
    return _by_site(frame, "patient", choose("genes", genes, list(frame.columns[2:])), minimum, dtype)


def fed_tcga_brca(train: bool = True, dtype: torch.dtype = torch.float32) -> FederatedData:
    """Load survival of breast cancer patients in six regions, FLamby's Fed-TCGA-BRCA.

    Rows (x `(39,)`, y `(2,)`): the age in years and 38 dummies of clinical variables; then the event (1 for
    death, 0 for censored) and the time in days. The regions Northeast, South, West, Midwest, Europe and Canada
    have 248, 156, 164, 129, 129 and 40 patients for training, 63, 40, 42, 33, 33 and 11 for testing.

    Source: Liu et al. (2018), Cell 173, 400–416; prepared by Ogier du Terrail et al. (2022), "FLamby" (MIT).

    Args:
        train: True for the training patients, False for the test patients.
        dtype: of x and y.
    """
    frame = read("fed_tcga_brca", "brca.csv").set_index("pid")
    folds = read("fed_tcga_brca", "train_test_split.csv")
    folds = folds[folds["fold"] == ("train" if train else "test")]
    region = [REGIONS[int(fold[-1])] for fold in folds["fold2"]]
    patients = frame.loc[folds["pid"]]
    features = list(frame.columns[:-2])
    x, y = (patients[columns].to_numpy(dtype=numpy.float64) for columns in (features, ["E", "T"]))
    return by_client(region, (x, y), dtype, features, REGIONS)


def _by_site(
    frame: pandas.DataFrame, barcode: str, columns: list[str], minimum: int, dtype: torch.dtype
) -> FederatedData:
    """Return rows by tissue source site, characters 6 and 7 of the barcode, the largest site first."""
    sites = frame[barcode].str[5:7]
    sizes = sorted(Counter(sites).items(), key=lambda item: (-item[1], item[0]))
    names = [site for site, size in sizes if size > minimum]
    if not names:
        raise ValueError(f"Expected a minimum below {sizes[0][1]}, the largest site, but got {minimum}")
    incomplete = [name for name in columns if frame.loc[sites.isin(names), name].isna().any()]
    if incomplete:
        raise ValueError(f"Expected measurements in every sample, but got missing ones of {incomplete}; leave them out")
    return by_client(sites, frame[columns].to_numpy(dtype=numpy.float64), dtype, columns, names)
