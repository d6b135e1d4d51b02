//! Functions that report memory sizes.

use crate::{Family, family};

pub(super) const FAMILIES: &[Family] = &[
    family("cuDeviceTotalMem", &[(2000, "", 12), (3020, "_v2", 12)]),
    family("cuMemGetInfo", &[(2000, "", 12), (3020, "_v2", 12)]),
];
