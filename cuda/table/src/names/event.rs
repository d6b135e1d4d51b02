//! Functions for events.

use crate::{Family, family};

pub(super) const FAMILIES: &[Family] = &[
    family("cuEventCreate", &[(2000, "", 12)]),
    family("cuEventCreateFromEGLSync", &[(9000, "", 12)]),
    family("cuEventDestroy", &[(2000, "", 12), (4000, "_v2", 12)]),
    family("cuEventElapsedTime", &[(2000, "", 12), (12080, "_v2", 12)]),
    family("cuEventQuery", &[(2000, "", 12)]),
    family("cuEventRecord", &[(2000, "", 12), (7000, "_ptsz", 12)]),
    family("cuEventRecordWithFlags", &[(11010, "", 12), (11010, "_ptsz", 12)]),
    family("cuEventSynchronize", &[(2000, "", 12)]),
];
