"""What happened in a run, as one self-contained page for a browser; see `fedtorch.report.folder`."""

from fedtorch.report.folder import read as read, render as render, write as write
