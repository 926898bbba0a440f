"""How the documentation is built: `make docs`. Pages are MyST Markdown; those with code cells run while it is built."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import fedtorch

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(Path(__file__).parent / "_tools"), str(ROOT)]  # pages.py and `experiments`
# Kernels that run the pages' cells are processes of their own; some cells import `experiments`.
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])

project = "fedtorch"
author = "the authors of fedtorch"
release = version = fedtorch.__version__

os.environ["TQDM_DISABLE"] = "1"  # progress would depend on the machine

extensions = [
    "myst_nb",
    "pages",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
source_suffix = {".md": "myst-nb", ".rst": "restructuredtext"}
exclude_patterns = ["_build", "_tools", "**/.ipynb_checkpoints"]

nb_execution_mode = "force"  # a cache knows the cells of a page, and not the package that they call
nb_execution_timeout = 120  # seconds a cell
nb_execution_raise_on_error = True
nb_execution_show_tb = True
nb_merge_streams = True
nb_output_stderr = "remove-warn"
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath", "amsmath"]
myst_heading_anchors = 3
suppress_warnings = ["mystnb.unknown_mime_type", "ref.python"]  # the latter: names that several classes have

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
napoleon_google_docstring, napoleon_numpy_docstring = True, False
napoleon_use_rtype, napoleon_use_ivar = False, True
napoleon_preprocess_types = False
add_module_names = False
python_use_unqualified_type_names = True
toc_object_entries = False
maximum_signature_line_length = 100

html_theme = "furo"
html_title = "fedtorch"
html_static_path = ["_static"]
html_show_sourcelink = False
html_theme_options = {"navigation_with_keys": True}
