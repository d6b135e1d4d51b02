//! The state machine's view of share groups' MPS servers: which groups need one, and which processes are clients.
//!
//! A group needs a server unless one of its members accepts only turns. All members must have the same user, because a
//! server serves one user. The server's own list determines which processes are clients. If a process reports that it
//! is a client, the owner only queries the server.

use std::collections::{BTreeMap, BTreeSet};

use cuda_control::{Action as Done, GivenUp, Incident, ServerState};
use cuda_mps::Report;
use sched::groups::Sharing;
use vram::TenantId;

use super::Core;
use super::types::{Action, SessionId};

/// A group's server.
#[derive(Debug, Default)]
struct Server {
    /// User ID of the server and its clients, if the members specify one.
    user: Option<u32>,
    /// Set while a group needs the server. Otherwise, it serves its clients until they exit.
    needed: bool,
    /// Set from the order to start the server until the server has exited.
    running: bool,
    state: ServerState,
    clients: BTreeSet<u32>,
    /// Program names of the clients in the latest report, because a program may exit before the loss of its server is
    /// detected.
    names: BTreeMap<u32, String>,
    /// Process IDs of the server's own processes.
    processes: BTreeSet<u32>,
}

impl Server {
    /// Sets the state if the server is needed. Otherwise, keeps the old state, so that new programs do not become
    /// clients.
    fn set_state(&mut self, state: ServerState) {
        if self.needed {
            self.state = state;
        }
    }
}

/// All servers, keyed by group.
#[derive(Debug, Default)]
pub(super) struct Servers(BTreeMap<String, Server>);

#[cfg(test)]
impl Servers {
    /// Returns the known clients of a group's server.
    pub(super) fn clients(&self, group: &str) -> BTreeSet<u32> {
        self.0.get(group).map(|server| server.clients.clone()).unwrap_or_default()
    }

    /// Returns the number of servers.
    pub(super) fn count(&self) -> usize {
        self.0.len()
    }
}

impl Core {
    /// Starts servers for groups that need one, and retires all other servers, after a change of the tenants.
    pub(super) fn renew_servers(&mut self) {
        let mut members: BTreeMap<&str, (Sharing, BTreeSet<Option<u32>>)> = BTreeMap::new();
        for tenant in self.tenants.values().filter(|tenant| !tenant.retired) {
            if let Some(group) = &tenant.spec.share_group {
                let (sharing, users) = members.entry(&group.name).or_insert((Sharing::Together, BTreeSet::new()));
                *sharing = group.sharing.min(*sharing);
                users.insert(group.user);
            }
        }
        let mut needed = BTreeMap::new();
        for (name, (sharing, users)) in members {
            if sharing != Sharing::Turns {
                needed.insert(name.to_owned(), users);
            }
        }
        for (name, server) in self.servers.0.iter_mut().filter(|(name, _)| !needed.contains_key(*name)) {
            server.state = ServerState::Unused;
            if std::mem::take(&mut server.needed) {
                self.actions.push(Action::RetireServer { group: name.clone() });
            }
        }
        self.servers.0.retain(|name, server| server.running || needed.contains_key(name));
        for (name, users) in needed {
            let server = self.servers.0.entry(name.clone()).or_default();
            if users.len() > 1 {
                if std::mem::take(&mut server.needed) {
                    self.actions.push(Action::RetireServer { group: name });
                }
                server.state = ServerState::Unavailable(
                    "the group's tenants have different `owner`s, and an MPS server serves one user".to_owned(),
                );
                continue;
            }
            let user = users.first().copied().flatten();
            if server.needed && server.user == user {
                continue;
            }
            (server.user, server.needed, server.running) = (user, true, true);
            server.state = ServerState::Starting;
            self.actions.push(Action::StartServer { group: name, user });
        }
    }

    /// Applies a report about a group's server.
    pub(super) fn server_changed(&mut self, group: &str, report: Report) {
        let Some(server) = self.servers.0.get_mut(group) else { return };
        match report {
            Report::Serves { again } => {
                server.set_state(ServerState::Serves);
                if again {
                    tracing::warn!(group, "the MPS control daemon of a group was restarted");
                    self.report_server(group, Done::ServerStarted);
                }
            }
            Report::Unavailable { why } => {
                tracing::warn!(group, why, "a group has no MPS server, so its members take turns");
                server.set_state(ServerState::Unavailable(why));
                (server.clients, server.processes) = Default::default();
                self.renew_clients(group);
            }
            Report::Clients { servers, clients } => {
                let session = |pid: u32| self.sessions.values().find(|session| session.pid == pid);
                let name = |pid: u32| session(pid).map(|session| session.program.clone());
                let names = clients.iter().filter_map(|&pid| Some((pid, name(pid)?)));
                server.names = names.collect();
                (server.processes, server.clients) = (servers, clients);
                self.renew_clients(group);
            }
            Report::Lost { clients, why } => {
                server.clients.retain(|pid| !clients.contains(pid));
                let named = |pid: u32| {
                    let program = server.names.get(&pid).cloned().unwrap_or_default();
                    GivenUp { pid, program, why: String::new() }
                };
                let programs: Vec<GivenUp> = clients.into_iter().map(named).collect();
                let names: Vec<String> = programs.iter().map(|one| format!("{} ({})", one.program, one.pid)).collect();
                tracing::error!(group, why, programs = names.join(" "), "programs have lost their MPS server");
                self.report_server(group, Done::ServerEnded { why, programs });
                self.renew_clients(group);
            }
            Report::Retired => {
                server.running = server.needed;
                if !server.needed {
                    self.renew_servers();
                } else {
                    // The group was added again while its control daemon exited.
                    let user = server.user;
                    self.actions.push(Action::StartServer { group: group.to_owned(), user });
                }
            }
        }
    }

    /// Records an incident for the group.
    fn report_server(&mut self, group: &str, action: Done) {
        self.incidents.add_incident(Incident { tenant: group.to_owned(), action });
    }

    /// Returns the name of a tenant's group.
    fn group_of(&self, tenant: TenantId) -> Option<&str> {
        self.tenants.get(&tenant)?.spec.share_group.as_ref().map(|group| group.name.as_str())
    }

    /// Records which processes of a group are clients now.
    fn renew_clients(&mut self, group: &str) {
        let members: Vec<TenantId> =
            self.tenants.keys().copied().filter(|id| self.group_of(*id) == Some(group)).collect();
        for tenant in members {
            self.renew_clients_of(tenant);
        }
    }

    /// Records which processes of a tenant are clients now.
    pub(super) fn renew_clients_of(&mut self, tenant: TenantId) {
        let server = self.group_of(tenant).and_then(|group| self.servers.0.get(group));
        let clients = server.map(|server| server.clients.clone()).unwrap_or_default();
        for session in self.sessions.values_mut().filter(|session| session.tenant == Some(tenant)) {
            session.concurrent = clients.contains(&session.pid);
        }
        self.renew_concurrency(tenant);
    }

    /// Records that a client's connection is closed. Its process ID may be reused.
    pub(super) fn client_gone(&mut self, tenant: TenantId, pid: u32) {
        let group = self.group_of(tenant).map(str::to_owned);
        let Some(group) = group else { return };
        if self.servers.0.get_mut(&group).is_some_and(|server| server.clients.remove(&pid)) {
            // The process may have exited because of a fault, which the server reports only for a short time.
            self.actions.push(Action::PollServer { group });
        }
    }

    /// Polls the server of a tenant's group when a process first reports that it is a client. Later reports do not
    /// cause polls, because a poll starts processes.
    pub(super) fn reports_client(&mut self, id: SessionId, tenant: TenantId) {
        let Some(session) = self.sessions.get_mut(&id) else { return };
        if std::mem::replace(&mut session.reported_client, true) {
            return;
        }
        let group =
            self.group_of(tenant).filter(|group| self.servers.0.get(*group).is_some_and(|server| server.needed));
        if let Some(group) = group {
            self.actions.push(Action::PollServer { group: group.to_owned() });
        }
    }

    /// Returns true if a process is a group's MPS server, whose work belongs to its clients.
    pub(super) fn is_server(&self, pid: u32) -> bool {
        self.servers.0.values().any(|server| server.processes.contains(&pid))
    }

    /// Returns the state of the server of a tenant's group.
    pub(super) fn server_state(&self, tenant: TenantId) -> ServerState {
        let server = self.group_of(tenant).and_then(|group| self.servers.0.get(group));
        server.map_or(ServerState::Unused, |server| server.state.clone())
    }
}
