"""The data sets that loaders exist for: what they are, whose, under which licence, and in which files."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["DataSet", "File", "data_sets", "describe"]


class File(NamedTuple):
    """A file of a data set."""

    name: str
    sha256: tuple[str, ...]  # several where copies differ in their packing, the publisher's first
    size: int  # bytes, of the publisher's
    url: str | None = None  # its public address; None where the publisher has none for this file alone
    note: str = ""  # how to come by it without


class DataSet(NamedTuple):
    """A data set and where it comes from; without files it ships inside scikit-learn."""

    name: str  # of the loader too
    what: str
    clients: str
    licence: str
    page: str  # of the publisher
    citation: str
    folder: str = ""  # in FEDTORCH_DATA_DIR and in the cache
    files: tuple[File, ...] = ()


def data_sets() -> tuple[DataSet, ...]:
    """All data sets, by name."""
    return DATA_SETS


def describe(name: str) -> DataSet:
    """The data set called `name`.

    Raises:
        ValueError: there is none; the message lists those there are.
    """
    for data_set in DATA_SETS:
        if data_set.name == name:
            return data_set
    raise ValueError(f"Expected a data set in {[data_set.name for data_set in DATA_SETS]}, but got {name!r}")


# addresses in repositories name the commit, so that the bytes behind them cannot change
COURSE = "https://raw.githubusercontent.com/alexjungaalto/FederatedLearning/"
COURSE_2025 = COURSE + "a960131983633da24ef9c13b7d38af035276ab9e/Edition2025/CodingAssignments/"
FLAMBY = (
    "https://raw.githubusercontent.com/owkin/FLamby/edacf54d5211520583b0133d55ac39b6fda8324b/"
    "flamby/datasets/fed_tcga_brca/"
)
MALSAR = "https://raw.githubusercontent.com/jiayuzhou/MALSAR/fb9751594983df020ddc4f7e4a40520ee7c37989/data/"
MNIST = "https://ossci-datasets.s3.amazonaws.com/mnist/"
UCI_HEART = "https://archive.ics.uci.edu/ml/machine-learning-databases/heart-disease/"

DATA_SETS: tuple[DataSet, ...] = (
    DataSet(
        name="battery",
        what="capacity of lithium-ion cells over charge cycles",
        clients="4, 55 or 125 cells",
        licence="cite the articles (CALCE); CC BY 4.0 (XJTU, MIT)",
        page=(
            "https://calce.umd.edu/battery-data and https://zenodo.org/records/10963339 and "
            "https://data.matr.io/1/projects/5c48dd2bc625d700019f3204"
        ),
        citation=(
            "CALCE Battery Group, University of Maryland (CS2 cells); F. Wang et al. (2024), Nature "
            "Communications 15, 4332; K. Severson et al. (2019), Nature Energy 4, 383-391"
        ),
        folder="battery",
        files=(
            File(
                "calce_cs2_cycles.csv",
                ("48a9714cb47a70ee276eb039f10a838158f1e9824a8ddd613063d6cad10fa33c",),
                396980,
                note="per-cycle values of github.com/XiuzeZhou/CALCE, dataset/CALCE.npy, as csv",
            ),
            File(
                "xjtu_capacity.csv",
                ("a88d3f0392f29026164919469732036a4179625ec76505bfa9dc1a5eab7f24d5",),
                908788,
                note="the column capacity of github.com/wang-fujin/PINN4SOH, folder data, as csv",
            ),
            File(
                "mit_capacity.csv",
                ("1d415449cf506c7d43ebc142cb5730654e4f489cb47a69bf64468f704bfa28be",),
                3999854,
                note="the column capacity of github.com/wang-fujin/PINN4SOH, folder data, as csv",
            ),
        ),
    ),
    DataSet(
        name="breast_cancer",
        what="cell nuclei of tumours, 569 rows x 30 features, malignant or benign",
        clients="split as wished",
        licence="CC BY 4.0",
        page="https://archive.ics.uci.edu/dataset/17/breast+cancer+wisconsin+diagnostic",
        citation="Wolberg, Mangasarian, Street (1993), UCI, doi:10.24432/C5DW2B",
    ),
    DataSet(
        name="cmapss",
        what="simulated run-to-failure records of turbofan engines, subset FD001",
        clients="100 engines",
        licence="none stated; public work of the U.S. Government, cite the paper",
        page=(
            "https://www.nasa.gov/intelligent-systems-division/discovery-and-systems-health/pcoe/pcoe-data-set-repository/"
        ),
        citation=(
            "A. Saxena, K. Goebel, D. Simon, N. Eklund (2008), Damage Propagation Modeling for Aircraft Engine "
            "Run-to-Failure Simulation, PHM08"
        ),
        folder="cmapss_fd001",
        files=(
            File(
                "train_FD001.txt",
                ("963b5e22825b34d8b21c69e1aeb4af3e647050eb672ee8834ba4b5d91d2de0f8",),
                3515356,
                note="in the archive CMAPSSData.zip",
            ),
            File(
                "test_FD001.txt",
                ("3cda7109ce17bafb5443f2ac926cfcf88154b941b8c4cf95eb55d1ddd6f52851",),
                2228855,
                note="in the archive CMAPSSData.zip",
            ),
            File(
                "RUL_FD001.txt",
                ("a19c8ec94931949d0485bdc35118206e9c81c4547b422efb9cf86f4ceddbceca",),
                429,
                note="in the archive CMAPSSData.zip",
            ),
        ),
    ),
    DataSet(
        name="diabetes",
        what="progression of diabetes after a year, 442 rows x 10 features",
        clients="split as wished",
        licence="none stated",
        page="https://www4.stat.ncsu.edu/~boos/var.select/diabetes.html",
        citation=(
            "Efron, Hastie, Johnstone, Tibshirani (2004), Least angle regression, Annals of Statistics 32, 407-499"
        ),
    ),
    DataSet(
        name="digits",
        what="8 x 8 images of handwritten digits, 1797 rows",
        clients="split as wished",
        licence="CC BY 4.0",
        page="https://archive.ics.uci.edu/dataset/80/optical+recognition+of+handwritten+digits",
        citation="Alpaydin, Kaynak (1998), UCI, doi:10.24432/C50P49",
    ),
    DataSet(
        name="fed_tcga_brca",
        what="clinical variables and survival of breast cancer patients",
        clients="6 regions",
        licence="MIT (repository); GDC policy: do not try to identify participants",
        page="https://github.com/owkin/FLamby",
        citation=(
            "J. Liu et al. (2018), Cell 173, 400-416; Ogier du Terrail et al. (2022), FLamby, NeurIPS Datasets "
            "and Benchmarks"
        ),
        folder="fed_tcga_brca",
        files=(
            File(
                "brca.csv",
                ("07cb53423f7d579d33cfdbf2cba57b2aee75318b85866c68ce39a75b1f1ba020",),
                113184,
                FLAMBY + "brca.csv",
            ),
            File(
                "centers.csv",
                ("d610df2dae0203ea229c9579747ed3eb8d28e137c5378f55acc6fe6b4632bb1d",),
                4274,
                FLAMBY + "centers.csv",
            ),
            File(
                "train_test_split.csv",
                ("1249c6543a4060ff0fdaf8510fc37017755836db6c9fc5e6af96057c36510990",),
                28946,
                FLAMBY + "dataset_creation_scripts/train_test_split.csv",
            ),
        ),
    ),
    DataSet(
        name="fmi_weather",
        what="weather observations in Finland",
        clients="207 stations (199 and 192 in the daily files)",
        licence="CC BY 4.0",
        page="https://en.ilmatieteenlaitos.fi/open-data",
        citation=(
            "Finnish Meteorological Institute open data; as in A. Jung, Federated Learning: From Theory to Practice"
        ),
        folder="fmi_weather",
        files=(
            File(
                "Assignment_MLBasicsData.csv",
                ("933843e9e575ca1d0ee5860ad32ee14bf24a78623910eab3e3b1d047792b8b93",),
                1259176,
                COURSE + "917ddba8716277151400430224b8373c7536daa5/Edition2024/Assignments/Assignment_MLBasicsData.csv",
            ),
            File(
                "FMI_data_2025.csv",
                ("b96b79f73b232c714ea6be585402fbc0d4891663e1d6f16d570ed291f3aeb336",),
                217671,
                COURSE_2025 + "Assignment3/FMI_data_2025.csv",
            ),
            File(
                "weather_data.csv",
                ("364a454156c46437751a152663a4bf979de580f85308bf7a4d2726c5845a351e",),
                73569,
                COURSE_2025 + "Assignment1/weather_data.csv",
            ),
            File(
                "fmidata.csv",
                ("c8c152eebc593d85234657eccd84905a616c54827e974e86127a68659e9e1c39",),
                60355,
                COURSE + "653b787cd3025b699533459da5517ed716559570/Edition2026/assignments/fmidata.csv",
            ),
        ),
    ),
    DataSet(
        name="heart_disease",
        what="heart disease, 13 features after dummy coding",
        clients="4 hospitals",
        licence="CC BY 4.0",
        page="https://archive.ics.uci.edu/dataset/45/heart+disease",
        citation="A. Janosi, W. Steinbrunn, M. Pfisterer, R. Detrano (1988), UCI, doi:10.24432/C52P4X",
        folder="heart_disease_uci",
        files=(
            File(
                "processed.cleveland.data",
                ("a74b7efa387bc9d108d7d0115d831fe9b414b29ae7124f331b622b4efa0427c8",),
                18461,
                UCI_HEART + "processed.cleveland.data",
            ),
            File(
                "processed.hungarian.data",
                ("d1ad108f785768cd3d7e82dc522e6f5a61eea93cccfb3a46ee8076f73fc3d796",),
                10263,
                UCI_HEART + "processed.hungarian.data",
            ),
            File(
                "processed.switzerland.data",
                ("834a405ccf5b66ab4056bb77794adc8df0b7125186454c0a1d002d33c6c3b314",),
                4109,
                UCI_HEART + "processed.switzerland.data",
            ),
            File(
                "processed.va.data",
                ("e7c93d8d0d2acdadfa4c5e8de768e2191e7f618b952e29623f1f0d5949ff6b8f",),
                6737,
                UCI_HEART + "processed.va.data",
            ),
        ),
    ),
    DataSet(
        name="heart_failure",
        what="heart disease of 918 patients, 11 covariates",
        clients="vertical: two parties with 5 and 6 covariates",
        licence="ODbL 1.0",
        page="https://www.kaggle.com/datasets/fedesoriano/heart-failure-prediction",
        citation="fedesoriano (2021), Heart Failure Prediction Dataset, Kaggle",
        folder="heart_failure",
        files=(
            File(
                "heart.csv",
                ("948420b084d8a3a0ca42b8419fce9aee175879e43f8aedf712377899a67aa49b",),
                35921,
                note="the site asks for an account",
            ),
        ),
    ),
    DataSet(
        name="mnist",
        what="28 x 28 images of handwritten digits, 60000 and 10000",
        clients="split as wished",
        licence="commonly given as CC BY-SA 3.0",
        page="http://yann.lecun.com/exdb/mnist/",
        citation="Y. LeCun, C. Cortes, C. Burges, The MNIST database of handwritten digits",
        folder="mnist",
        files=(
            File(
                "train-images-idx3-ubyte.gz",
                (
                    "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
                    "71524e2cd1ad2968737f7f2f2ff69cbfc32df8ccddff51593f7cb2d4e0eb5b64",
                ),
                9912422,
                MNIST + "train-images-idx3-ubyte.gz",
            ),
            File(
                "train-labels-idx1-ubyte.gz",
                ("3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",),
                28881,
                MNIST + "train-labels-idx1-ubyte.gz",
            ),
            File(
                "t10k-images-idx3-ubyte.gz",
                ("8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",),
                1648877,
                MNIST + "t10k-images-idx3-ubyte.gz",
            ),
            File(
                "t10k-labels-idx1-ubyte.gz",
                ("f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",),
                4542,
                MNIST + "t10k-labels-idx1-ubyte.gz",
            ),
        ),
    ),
    DataSet(
        name="school",
        what="examination scores of 15362 pupils in London",
        clients="139 schools",
        licence="none stated",
        page="https://github.com/jiayuzhou/MALSAR",
        citation=(
            "Inner London Education Authority; D. Nuttall et al. (1989); as coded by B. Bakker, T. Heskes "
            "(2003), JMLR 4, 83-99"
        ),
        folder="school",
        files=(
            File(
                "school.mat",
                ("57fb3238fdd03a9aa17276e2ce18d9bbb5d128c3261e794fe6233b58b6909068",),
                44759,
                MALSAR + "school.mat",
            ),
        ),
    ),
    DataSet(
        name="student_performance",
        what="grades in two Portuguese schools, 395 and 649 pupils",
        clients="2 schools",
        licence="CC BY 4.0",
        page="https://archive.ics.uci.edu/dataset/320/student+performance",
        citation=(
            "P. Cortez, A. Silva (2008), Using Data Mining to Predict Secondary School Student Performance, "
            "UCI, doi:10.24432/C5TG7T"
        ),
        folder="student_performance",
        files=(
            File(
                "student-mat.csv",
                ("e47f9ee225e1ee6e69b7564e6dac7123e80b8486677fe111f351964cef5dec80",),
                56993,
                note="in the archive student.zip",
            ),
            File(
                "student-por.csv",
                ("a7594a11d7771c0efe1a740824e0e833da9c4cad07c39a9766a874575563fb3f",),
                93220,
                note="in the archive student.zip",
            ),
        ),
    ),
    DataSet(
        name="tcga_brca_expression",
        what="RNA-seq expression of 139 breast cancer genes in 476 tumours",
        clients="13 tissue source sites",
        licence="GPL-2 (R package); GDC policy: do not try to identify participants",
        page="https://github.com/Zhangxf-ccnu/JEGN",
        citation=(
            "X.-F. Zhang, L. Ou-Yang, T. Yan, X. Hu, H. Yan (2019), A joint graphical model for inferring gene "
            "networks across multiple subpopulations and data types"
        ),
        folder="tcga_brca_expression",
        files=(
            File(
                "tcga_brca_kegg05224_mrnaseq.csv",
                ("2c7185d75e56435f8a191ee91bad54737bc79009f272f7471897f21b8aaf47ce",),
                1222315,
                note="the four mRNAseq matrices of TCGA.BRCA.rda, stacked, as csv",
            ),
        ),
    ),
    DataSet(
        name="tcpa_brca_rppa",
        what="reverse-phase protein arrays of 901 breast cancer samples, 224 antibodies",
        clients="tissue source sites, 7 with more than 50 samples",
        licence="none stated; GDC policy: do not try to identify participants",
        page="https://tcpaportal.org/tcpa/download.html",
        citation=(
            "J. Li et al. (2013), TCPA: a resource for cancer functional proteomics data, Nature Methods 10, 1046"
        ),
        folder="tcpa_brca_rppa",
        files=(
            File(
                "TCGA-BRCA-L4.csv",
                ("96d4a973d14d3fd728974ba648573ef884cb34faa607604226f143cde4f8e50b",),
                1763727,
                note="chosen in a form there",
            ),
        ),
    ),
)
