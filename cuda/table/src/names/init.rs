//! Functions for initialization, errors, and function lookup.

use crate::{Family, family};

pub(super) const FAMILIES: &[Family] = &[
    family("cuDriverGetVersion", &[(2020, "", 12)]),
    family("cuGetErrorName", &[(6000, "", 12)]),
    family("cuGetErrorString", &[(6000, "", 12)]),
    family("cuGetExportTable", &[(3000, "", 12)]),
    family("cuGetProcAddress", &[(11030, "", 12), (12000, "_v2", 12), (0, "_v2_ptsz", 12)]),
    family("cuInit", &[(2000, "", 12)]),
];
