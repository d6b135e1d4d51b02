//! Pinned memory and the staging blob. Both are blobs in the window, and are registered with the card.

use cuda_calls::own;
use cuda_ring::BlobKind;

use crate::driver::{NOT_SUPPORTED, Needed};
use crate::executor::{Broken, Executor};
use crate::pending::Origin;

/// `CU_MEMHOSTREGISTER_PORTABLE` and `CU_MEMHOSTREGISTER_DEVICEMAP`.
const PORTABLE_AND_MAPPED: u64 = 3;
/// `CUDA_ERROR_INVALID_VALUE`.
const INVALID_VALUE: i32 = 1;

impl Executor {
    /// Handles a message that registers or releases a blob.
    pub(crate) fn pinned(&mut self, origin: Origin, words: &[u64]) -> Result<(), Broken> {
        let code = match (origin.header.op, words) {
            (own::PIN, [id, address]) => self.pin(number(*id)?, *address),
            (own::UNPIN, [id]) => self.unpin(number(*id)?),
            (own::STAGING, [id]) => self.stage(number(*id)?),
            _ => return Err(Broken::Malformed),
        };
        self.finish(origin, code, &[]);
        Ok(())
    }

    fn pin(&mut self, id: u32, address: u64) -> i32 {
        if !self.window.pin(id, address) {
            return INVALID_VALUE;
        }
        let Some(blob) = self.window.blob(id) else { return INVALID_VALUE };
        match self.driver.invoke(Needed::Register, &[address, blob.bytes, PORTABLE_AND_MAPPED]) {
            0 => {
                self.objects.add_pinned(address, blob.bytes);
                0
            }
            code => {
                self.window.unpin(id);
                code
            }
        }
    }

    /// Unregisters a pinned blob from the card, and unmaps it. Returns the driver's result, or an error if the blob is
    /// not pinned.
    pub(crate) fn unpin(&mut self, id: u32) -> i32 {
        let Some(blob) = self.window.blob(id) else { return INVALID_VALUE };
        let Some(address) = blob.pinned else { return INVALID_VALUE };
        let code = self.driver.invoke(Needed::Unregister, &[address]);
        self.objects.remove_pinned(address);
        self.window.unpin(id);
        self.log.unpinned(id);
        code
    }

    /// Returns true if the worker needs a blob until the program exits: a blob with control words or rings, or the
    /// staging blob.
    pub(crate) fn needs_blob(&self, id: u32) -> bool {
        let kind = self.window.blob(id).map(|blob| blob.kind);
        matches!(kind, Some(BlobKind::Control | BlobKind::Ring)) || self.staging == Some(id)
    }

    fn stage(&mut self, id: u32) -> i32 {
        let Some(blob) = self.window.blob(id).filter(|blob| blob.kind == BlobKind::Staging) else {
            return INVALID_VALUE;
        };
        if self.staging.is_some() {
            return INVALID_VALUE;
        }
        let address = self.window.address(&blob);
        match self.driver.invoke(Needed::Register, &[address, blob.bytes, PORTABLE_AND_MAPPED]) {
            // Without the registration, the driver copies through its own memory, which is slower but correct.
            0 | NOT_SUPPORTED => {
                self.staging = Some(id);
                0
            }
            code => code,
        }
    }
}

fn number(word: u64) -> Result<u32, Broken> {
    u32::try_from(word).map_err(|_| Broken::Malformed)
}
