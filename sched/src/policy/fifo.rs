//! Runs submissions in order of arrival, one vGPU at a time.

use super::{Policy, Room, View};
use crate::types::TenantId;
use serde::{Deserialize, Serialize};

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Fifo;

impl Policy for Fifo {
    fn joined(&mut self, _vgpu: TenantId) {}

    fn left(&mut self, _vgpu: TenantId) {}

    fn pick(&mut self, view: &View<'_>) -> Option<TenantId> {
        let first = view.oldest(|_| true)?;
        match view.room {
            Room::Free => Some(first),
            Room::Behind { vgpu, .. } => (vgpu == first).then_some(first),
            Room::Full => None,
        }
    }
}
