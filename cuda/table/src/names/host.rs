//! Functions for pinned host memory.

use crate::{Family, family};

pub(super) const FAMILIES: &[Family] = &[
    family("cuMemAllocHost", &[(2000, "", 12), (3020, "_v2", 12)]),
    family("cuMemFreeHost", &[(2000, "", 12)]),
    family("cuMemHostAlloc", &[(2020, "", 12)]),
    family("cuMemHostGetDevicePointer", &[(2020, "", 12), (3020, "_v2", 12)]),
    family("cuMemHostGetFlags", &[(2030, "", 12)]),
    family("cuMemHostRegister", &[(4000, "", 12), (6050, "_v2", 12)]),
    family("cuMemHostUnregister", &[(4000, "", 12)]),
];
