from .imputation import completed as completed, imputed as imputed
from .pooling import pooled as pooled
