//! Functions that allocate card memory for the program.

use crate::{Family, family};

pub(super) const FAMILIES: &[Family] = &[
    family("cuMemAlloc", &[(2000, "", 12), (3020, "_v2", 12)]),
    family("cuMemAllocAsync", &[(11020, "", 12), (11020, "_ptsz", 12)]),
    family("cuMemAllocFromPoolAsync", &[(11020, "", 12), (11020, "_ptsz", 12)]),
    family("cuMemAllocManaged", &[(6000, "", 12)]),
    family("cuMemAllocPitch", &[(2000, "", 12), (3020, "_v2", 12)]),
];
