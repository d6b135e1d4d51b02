//! Functions that free card memory.

use crate::{Family, family};

pub(super) const FAMILIES: &[Family] = &[
    family("cuMemFree", &[(2000, "", 12), (3020, "_v2", 12)]),
    family("cuMemFreeAsync", &[(11020, "", 12), (11020, "_ptsz", 12)]),
];
