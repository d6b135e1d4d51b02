//! Policy without scheduling. Each submission starts when it arrives, unless a cap or quarantine prevents it.

use super::{Policy, View};
use crate::types::TenantId;
use serde::{Deserialize, Serialize};

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Direct;

impl Policy for Direct {
    fn joined(&mut self, _vgpu: TenantId) {}

    fn left(&mut self, _vgpu: TenantId) {}

    fn pick(&mut self, view: &View<'_>) -> Option<TenantId> {
        view.oldest(|_| true)
    }
}
