//! Tokens of chunks that processes of a tenant share.

use std::collections::HashMap;

use cuda_protocol::Share;
use vram::VmId as TenantId;

/// Tokens that a tenant has at most.
pub(super) const SHARES_MOST: usize = 1 << 16;

/// The tokens of one tenant.
#[derive(Debug, Default)]
struct Own {
    by_token: HashMap<Share, Vec<u32>>,
    /// The same by what they stand for.
    by_chunks: HashMap<Vec<u32>, Share>,
}

/// All of them, by tenant: none of them opens anything for another one, nor takes room from it.
#[derive(Debug, Default)]
pub(super) struct Shares(HashMap<TenantId, Own>);

impl Shares {
    /// Returns what a token of a tenant stands for.
    pub(super) fn chunks(&self, tenant: TenantId, share: Share) -> Option<&Vec<u32>> {
        self.0.get(&tenant)?.by_token.get(&share)
    }

    /// Returns the token of these chunks of a tenant.
    pub(super) fn token(&self, tenant: TenantId, chunks: &Vec<u32>) -> Option<Share> {
        self.0.get(&tenant)?.by_chunks.get(chunks).copied()
    }

    /// Says if a tenant may have one more.
    pub(super) fn has_room(&self, tenant: TenantId) -> bool {
        self.0.get(&tenant).is_none_or(|own| own.by_token.len() < SHARES_MOST)
    }

    /// Notes a token.
    pub(super) fn add(&mut self, tenant: TenantId, share: Share, chunks: Vec<u32>) {
        let own = self.0.entry(tenant).or_default();
        own.by_chunks.insert(chunks.clone(), share);
        own.by_token.insert(share, chunks);
    }

    /// A chunk of a tenant is gone, and so are the tokens that stand for it.
    pub(super) fn forget(&mut self, tenant: TenantId, chunk: u32) {
        let Some(own) = self.0.get_mut(&tenant) else { return };
        own.by_token.retain(|_, chunks| !chunks.contains(&chunk));
        own.by_chunks.retain(|chunks, _| !chunks.contains(&chunk));
        if own.by_token.is_empty() {
            self.0.remove(&tenant);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: TenantId = vram::VmId(1);
    const TWO: TenantId = vram::VmId(2);

    fn share(number: usize) -> Share {
        let mut token = [0; 32];
        token[..8].copy_from_slice(&number.to_le_bytes());
        Share(token)
    }

    #[test]
    fn who_has_all_tokens_that_a_tenant_may_have_takes_none_from_others() {
        let mut shares = Shares::default();
        for number in 0..SHARES_MOST {
            assert!(shares.has_room(ONE));
            shares.add(ONE, share(number), vec![number as u32, 1 << 20]);
        }
        assert!(!shares.has_room(ONE));
        assert!(shares.has_room(TWO));
        shares.forget(ONE, 5);
        assert!(shares.has_room(ONE), "a token went with its chunk");
        assert_eq!((shares.chunks(ONE, share(5)), shares.token(ONE, &vec![5, 1 << 20])), (None, None));
        assert_eq!(shares.chunks(TWO, share(6)), None, "another tenant's");
        shares.forget(ONE, 1 << 20);
        assert!(shares.0.is_empty(), "nothing is kept");
    }
}
