from .folder import render as render, write as write
