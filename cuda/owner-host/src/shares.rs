//! Tokens for chunks shared between the processes of a tenant.

use std::collections::{HashMap, VecDeque};

use cuda_protocol::Share;
use vram::TenantId;

/// Maximum number of tokens per tenant.
const SHARES_MOST: usize = 1 << 16;
/// Maximum total number of chunks in a tenant's tokens.
const NAMED_MOST: usize = 1 << 18;
/// Number of tokens examined for each new token. Two are enough to keep stale tokens in the minority.
const SWEPT_AT_ONCE: usize = 4;

/// A chunk in a token: its index, and the number of the chunk that used the index when the token was created.
pub type Named = (u32, u64);

/// The tokens of one tenant.
#[derive(Debug, Default)]
struct Own {
    by_token: HashMap<Share, Vec<Named>>,
    /// The same tokens, indexed by their chunks.
    by_chunks: HashMap<Vec<Named>, Share>,
    /// All tokens, in the order in which they are examined.
    ring: VecDeque<Share>,
    /// Total number of chunks in the tokens.
    named: usize,
}

/// All tokens, keyed by tenant. A token is useless to other tenants, and does not count toward their limits.
///
/// Freeing a chunk takes no time here: the chunk's tokens only become stale. Each time a token is created, a few tokens
/// are examined, and the stale ones are removed.
#[derive(Debug, Default)]
pub struct Shares(HashMap<TenantId, Own>);

impl Shares {
    /// Returns the chunks in a tenant's token. Some of them may no longer exist.
    #[must_use]
    pub fn chunks(&self, tenant: TenantId, share: Share) -> Option<&Vec<Named>> {
        self.0.get(&tenant)?.by_token.get(&share)
    }

    /// Returns the token for these chunks of a tenant.
    #[must_use]
    pub fn token(&self, tenant: TenantId, chunks: &[Named]) -> Option<Share> {
        self.0.get(&tenant)?.by_chunks.get(chunks).copied()
    }

    /// Examines some of a tenant's tokens, and removes those with a chunk that no longer `exists`. Returns the number
    /// of examined chunks.
    pub fn sweep(&mut self, tenant: TenantId, exists: impl Fn(&Named) -> bool) -> usize {
        let Some(own) = self.0.get_mut(&tenant) else { return 0 };
        let mut looked_at = 0;
        for _ in 0..SWEPT_AT_ONCE.min(own.ring.len()) {
            let Some(share) = own.ring.pop_front() else { break };
            let Some(chunks) = own.by_token.get(&share) else { continue };
            looked_at += chunks.len();
            if chunks.iter().all(&exists) {
                own.ring.push_back(share);
            } else if let Some(chunks) = own.by_token.remove(&share) {
                own.by_chunks.remove(&chunks);
                own.named -= chunks.len();
            }
        }
        looked_at
    }

    /// Returns true if a tenant may have one more token with this many chunks.
    #[must_use]
    pub fn has_room(&self, tenant: TenantId, chunks: usize) -> bool {
        let own = self.0.get(&tenant);
        own.is_none_or(|own| own.by_token.len() < SHARES_MOST && own.named + chunks <= NAMED_MOST)
    }

    /// Adds a token.
    pub fn add(&mut self, tenant: TenantId, share: Share, chunks: Vec<Named>) {
        let own = self.0.entry(tenant).or_default();
        own.named += chunks.len();
        own.ring.push_back(share);
        own.by_chunks.insert(chunks.clone(), share);
        own.by_token.insert(share, chunks);
    }

    /// Removes all tokens of a tenant that has no programs left.
    pub fn forget(&mut self, tenant: TenantId) {
        self.0.remove(&tenant);
    }

    /// Returns the number of tokens and the total number of chunks in them, for audits.
    ///
    /// # Panics
    /// Panics if the records of a token are inconsistent.
    #[must_use]
    pub fn count(&self, tenant: TenantId) -> (usize, usize) {
        self.0.get(&tenant).map_or((0, 0), |own| {
            assert_eq!(own.named, own.by_token.values().map(Vec::len).sum::<usize>());
            assert_eq!((own.by_token.len(), own.ring.len()), (own.by_chunks.len(), own.by_token.len()));
            (own.by_token.len(), own.named)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: TenantId = vram::TenantId(1);
    const TWO: TenantId = vram::TenantId(2);

    fn share(number: usize) -> Share {
        let mut token = [0; 32];
        token[..8].copy_from_slice(&number.to_le_bytes());
        Share(token)
    }

    #[test]
    fn a_tenant_with_all_its_tokens_takes_none_from_others() {
        let mut shares = Shares::default();
        for number in 0..SHARES_MOST {
            assert!(shares.has_room(ONE, 2));
            shares.add(ONE, share(number), vec![(number as u32, 1), (1 << 20, 1)]);
        }
        assert!(!shares.has_room(ONE, 1));
        assert!(shares.has_room(TWO, 1));
        assert_eq!(shares.sweep(ONE, |&(index, _)| index != 2), 2 * SWEPT_AT_ONCE);
        assert!(shares.has_room(ONE, 1), "the token was removed with its chunk");
        assert_eq!((shares.chunks(ONE, share(2)), shares.token(ONE, &[(2, 1), (1 << 20, 1)])), (None, None));
        assert_eq!(shares.chunks(TWO, share(6)), None, "another tenant's");
        shares.forget(ONE);
        assert!(shares.0.is_empty(), "no tokens are left");
    }

    #[test]
    fn share_tokens_are_bounded_by_chunks_they_name() {
        let mut shares = Shares::default();
        let mut number = 0;
        while shares.has_room(ONE, 1 << 10) {
            shares.add(ONE, share(number), (0..1 << 10).map(|at| (at, number as u64)).collect());
            number += 1;
        }
        assert_eq!(shares.count(ONE), (NAMED_MOST >> 10, NAMED_MOST));
        for _ in 0..number {
            assert!(shares.sweep(ONE, |_| false) <= SWEPT_AT_ONCE << 10);
        }
        assert_eq!(shares.count(ONE), (0, 0));
    }
}
