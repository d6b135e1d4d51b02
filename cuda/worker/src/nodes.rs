//! Graph nodes whose parameters contain pointers: kernels, and host functions of the guest.

use cuda_calls::own::{self, LAUNCH_WORDS, MAX_NODES, edit};
use cuda_calls::{Fault, Handles as _, Kind};

use crate::driver::Needed;
use crate::executor::{Broken, Executor};
use crate::host_functions::callback;
use crate::launches::halves;
use crate::pending::Origin;

/// `CUDA_KERNEL_NODE_PARAMS`, second version.
#[repr(C)]
struct KernelNode {
    function: u64,
    dimensions: [u32; 6],
    shared: u32,
    parameters: u64,
    extra: u64,
    kernel: u64,
    context: u64,
}

/// `CUDA_HOST_NODE_PARAMS`.
#[repr(C)]
struct HostNode {
    function: u64,
    data: u64,
}

/// Driver functions for one kind of node, indexed as in [`edit`].
type Functions = [Needed; 3];

/// Node that a message adds or changes.
struct Target {
    edit: u64,
    /// The guest's handles for the graph and for the node.
    handles: [u64; 2],
    /// The driver's handles for the graph, or executable graph, and for the node.
    graph: u64,
    node: u64,
    before: Vec<u64>,
}

impl Executor {
    fn target(&self, edit: u64, graph: u64, node: u64, before: &[u64]) -> Result<Target, Fault> {
        let mut target = Target { edit, handles: [graph, node], graph: 0, node: 0, before: Vec::new() };
        match edit {
            edit::ADD if self.objects.is_free(Kind::Node, node) => {
                target.graph = self.objects.find(Kind::Graph, graph)?;
                for node in before {
                    target.before.push(self.objects.find(Kind::Node, *node)?);
                }
            }
            edit::SET if graph == 0 => target.node = self.objects.find(Kind::Node, node)?,
            edit::SET_EXEC => {
                target.graph = self.objects.find(Kind::Exec, graph)?;
                target.node = self.objects.find(Kind::Node, node)?;
            }
            _ => return Err(Fault::Malformed),
        }
        Ok(target)
    }

    /// Adds or changes a node, and replies with its handle.
    fn edit_node(
        &mut self,
        origin: Origin,
        target: &Target,
        functions: Functions,
        parameters: u64,
    ) -> Result<(), Broken> {
        let [add, set, set_exec] = functions;
        let [graph_handle, mut node_handle] = target.handles;
        let code = match target.edit {
            edit::ADD => {
                let mut made = 0u64;
                let before = target.before.as_ptr().addr() as u64;
                let place = (&raw mut made).addr() as u64;
                let arguments = [place, target.graph, before, target.before.len() as u64, parameters];
                let code = self.driver.invoke(add, &arguments);
                if code == 0 {
                    let (context, owner) = (origin.route.context, Some(graph_handle));
                    node_handle = self.objects.insert_or_find(Kind::Node, node_handle, made, context, owner)?;
                }
                code
            }
            edit::SET => self.driver.invoke(set, &[target.node, parameters]),
            _ => self.driver.invoke(set_exec, &[target.graph, target.node, parameters]),
        };
        self.finish(origin, code, &[node_handle]);
        Ok(())
    }

    /// Adds or changes a kernel node.
    pub(crate) fn kernel_node(&mut self, origin: Origin, words: &[u64]) -> Result<(), Broken> {
        let [edit, graph, node, is_kernel, context, count, rest @ ..] = words else { return Err(Broken::Malformed) };
        let (before, launch) = split_nodes(rest, *count)?;
        let (head, bytes) = launch.split_first_chunk::<LAUNCH_WORDS>().ok_or(Broken::Malformed)?;
        let [function_handle, first, second, third, fourth, _, _, parameter_words] = *head;
        if bytes.len() as u64 != parameter_words {
            return Err(Broken::Malformed);
        }
        let find = || {
            let target = self.target(*edit, *graph, *node, before)?;
            let function = self.objects.find(Kind::Function, function_handle)?;
            let context = if *context == 0 { 0 } else { self.objects.find(Kind::Context, *context)? };
            Ok((target, function, context))
        };
        let (target, function, context) = match find() {
            Ok(found) => found,
            Err(fault) => return self.refuse(origin, fault),
        };
        let pointers = self.parameter_pointers(function_handle, bytes)?;
        let ((gx, gy), (gz, bx), (by, bz)) = (halves(first), halves(second), halves(third));
        let (function, kernel) = if *is_kernel == 0 { (function, 0) } else { (0, function) };
        let parameters = KernelNode {
            function,
            dimensions: [gx, gy, gz, bx, by, bz].map(|dimension| dimension as u32),
            shared: fourth as u32,
            parameters: pointers.as_ptr().addr() as u64,
            extra: 0,
            kernel,
            context,
        };
        let functions = [Needed::AddKernelNode, Needed::SetKernelNode, Needed::SetExecKernelNode];
        self.edit_node(origin, &target, functions, (&raw const parameters).addr() as u64)
    }

    /// Adds or changes a node with a host function of the guest.
    pub(crate) fn host_node(&mut self, origin: Origin, words: &[u64]) -> Result<(), Broken> {
        let [edit, graph, node, number, count, rest @ ..] = words else { return Err(Broken::Malformed) };
        let (before, rest) = split_nodes(rest, *count)?;
        if !rest.is_empty() {
            return Err(Broken::Malformed);
        }
        let target = match self.target(*edit, *graph, *node, before) {
            Ok(target) => target,
            Err(fault) => return self.refuse(origin, fault),
        };
        let parameters = HostNode { function: callback(), data: number | own::CAPTURED };
        let functions = [Needed::AddHostNode, Needed::SetHostNode, Needed::SetExecHostNode];
        self.edit_node(origin, &target, functions, (&raw const parameters).addr() as u64)
    }

    /// Replies with the error of a call whose objects are invalid, or rejects a malformed message.
    fn refuse(&mut self, origin: Origin, fault: Fault) -> Result<(), Broken> {
        match fault {
            Fault::Malformed => Err(Broken::Malformed),
            Fault::Refused(code) => {
                self.finish(origin, code, &[]);
                Ok(())
            }
        }
    }
}

/// Splits `words` into a node's dependencies and the words after them.
fn split_nodes(words: &[u64], count: u64) -> Result<(&[u64], &[u64]), Broken> {
    let count = usize::try_from(count).ok().filter(|count| *count <= MAX_NODES).ok_or(Broken::Malformed)?;
    words.split_at_checked(count).ok_or(Broken::Malformed)
}
