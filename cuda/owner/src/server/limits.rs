//! Limits on descriptors and connections.

use super::Cause;
use super::outbox::{Connection, Unread};
use crate::core::SessionId;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::collections::BTreeMap;

/// Maximum total number of connections.
const CONNECTIONS_MOST: usize = 2048;
/// Time limit for a connection to send `Hello`, in ns.
// TIMEOUT: the shim sends `Hello` immediately, but a busy host may take a second to run it.
pub(super) const SILENT_NS: u64 = 5_000_000_000;
/// Time in ns during which no connections are accepted after descriptors have run out.
// TIMEOUT: other connections may be closed in this time. Connecting programs wait only slightly longer.
pub(super) const FULL_NS: u64 = 100_000_000;
/// Number of descriptors reserved for logs, sockets and the driver's own files.
const RESERVED_DESCRIPTORS: u64 = 128;

/// Limits derived from the process's descriptor limit.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// Maximum number of connections. Each connection uses two descriptors.
    pub(super) connections: usize,
    /// Maximum number of pieces of memory. Each piece uses one descriptor.
    pub(super) pieces: usize,
    /// Maximum number of descriptors in flight to programs. This is half of the kernel's limit per user, to leave some
    /// for the same user's other owners.
    unread: usize,
}

impl Limits {
    /// Raises the process's descriptor limit to the maximum that the system allows, because each chunk needs a
    /// descriptor. Divides the limit between connections and pieces.
    pub(super) fn raise() -> Self {
        let limit = getrlimit(Resource::Nofile);
        let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
        Self::for_descriptors(getrlimit(Resource::Nofile).current.unwrap_or(1 << 20))
    }

    fn for_descriptors(descriptors: u64) -> Self {
        let connections = usize::try_from(descriptors / 16).unwrap_or(usize::MAX).clamp(4, CONNECTIONS_MOST);
        // Allow for as many disconnected processes as connections. Each disconnected process needs one descriptor.
        let pieces = descriptors.saturating_sub(RESERVED_DESCRIPTORS.min(descriptors / 4) + 3 * connections as u64);
        let count = |number: u64| usize::try_from(number).unwrap_or(usize::MAX);
        Self { connections, pieces: count(pieces), unread: count(descriptors / 2) }
    }

    /// Returns the maximum number of connections of each tenant, and of each user without a tenant, if `tenants`
    /// tenants exist.
    pub(super) fn of_cause(&self, tenants: usize) -> usize {
        (self.connections / (tenants + 1)).max(2)
    }

    pub(super) fn unread(&self, tenants: usize) -> Unread {
        Unread { all: self.unread, tenants }
    }

    /// Decides whether to admit a new connection. If the limit is reached, the new connection replaces the oldest one
    /// that has not sent `Hello`. If the limit of the connection's tenant or user is reached, only a connection of the
    /// same tenant or user can be replaced.
    pub(super) fn admit(
        &self,
        connections: &BTreeMap<SessionId, Connection>,
        greeted: impl Fn(SessionId) -> bool,
        cause: Cause,
        tenants: usize,
    ) -> Admission {
        let own = || connections.iter().filter(|(_, connection)| connection.cause == cause);
        let own_are_many = own().count() >= self.of_cause(tenants);
        if !own_are_many && connections.len() < self.connections {
            return Admission::Admitted;
        }
        let may_go = |(id, connection): &(&SessionId, &Connection)| {
            (!own_are_many || connection.cause == cause) && !greeted(**id)
        };
        let oldest = connections.iter().filter(may_go).min_by_key(|(_, connection)| connection.since);
        oldest.map_or(Admission::Refused, |(&id, _)| Admission::Replaces(id))
    }
}

/// Decision about a new connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Admission {
    Admitted,
    /// The new connection replaces this one, which is closed.
    Replaces(SessionId),
    /// A limit on connections is reached, and no other connection can be replaced.
    Refused,
}

#[cfg(test)]
mod tests {
    use super::*;
    use cuda_protocol::Link;

    fn cause(tenant: u32) -> Cause {
        Cause::Tenant(vram::TenantId(tenant))
    }

    fn connection(tenant: u32, since: u64) -> Connection {
        Connection::new(Link::pair().expect("a pair").0, cause(tenant), since)
    }

    #[test]
    fn divided_descriptors_stay_within_limit() {
        for descriptors in [64, 256, 1024, 20_000, 1 << 20] {
            let limits = Limits::for_descriptors(descriptors);
            let all = 2 * limits.connections + limits.pieces;
            assert!((all as u64) < descriptors, "{descriptors}: {limits:?}");
            assert!((limits.unread as u64) < descriptors);
        }
    }

    #[test]
    fn a_tenant_with_all_its_connections_leaves_anothers() {
        let limits = Limits::for_descriptors(256);
        let mut connections = BTreeMap::new();
        let mut number = 0;
        while limits.admit(&connections, |_| true, cause(1), 2) == Admission::Admitted {
            number += 1;
            connections.insert(SessionId(number), connection(1, number));
        }
        assert_eq!(connections.len(), limits.of_cause(2));
        assert_eq!(limits.admit(&connections, |_| true, cause(2), 2), Admission::Admitted);
    }

    #[test]
    fn silent_connections_of_same_tenant_are_replaced_first() {
        let limits = Limits::for_descriptors(1024);
        let mut connections = BTreeMap::new();
        let mut number = 0;
        while limits.admit(&connections, |_| false, cause(1), 1) == Admission::Admitted {
            number += 1;
            connections.insert(SessionId(number), connection(1, number));
        }
        let own = connections.len() as u64;
        assert_eq!(own as usize, limits.of_cause(1));
        assert_eq!(limits.admit(&connections, |id| id.0 < 5, cause(1), 1), Admission::Replaces(SessionId(5)));
        assert_eq!(limits.admit(&connections, |_| false, cause(2), 1), Admission::Admitted);
        // Many users connect a few times each.
        while connections.len() < limits.connections {
            number += 1;
            connections.insert(SessionId(number), connection(number as u32, number));
        }
        let admission = limits.admit(&connections, |id| id.0 <= own, cause(1 << 20), 1);
        assert_eq!(admission, Admission::Replaces(SessionId(own + 1)), "the oldest silent connection is replaced");
        assert_eq!(limits.admit(&connections, |_| true, cause(1 << 20), 1), Admission::Refused);
        assert_eq!(limits.admit(&connections, |id| id.0 <= own, cause(1), 1), Admission::Refused, "others' stay");
    }
}
