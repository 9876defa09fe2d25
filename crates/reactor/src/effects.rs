//! What a call of the engine leaves to be done: operations go to this thread's ring, answers to the
//! threads whose clients wait for them.

use crate::reactors::Shared;
use hearth_engine::api::{Completion, Effects};
use hearth_io::Proactor;

/// A thread's effects, and its way to the other threads.
pub(crate) struct Carrier {
    /// What the engine's next call fills.
    pub fx: Effects,
    /// Answers that are this thread's own.
    pub own: Vec<Completion>,
    index: u32,
    outgoing: Vec<Vec<Completion>>,
}

impl Carrier {
    pub fn new(index: u32, shared: &Shared) -> Carrier {
        Carrier {
            fx: Effects::default(),
            own: Vec::new(),
            index,
            outgoing: (0..=shared.threads).map(|_| Vec::new()).collect(),
        }
    }

    /// Empties the effects; answers of this thread's own are left in `own`.
    pub fn carry_out(&mut self, proactor: &mut dyn Proactor, shared: &Shared) {
        for op in self.fx.ios.drain(..) {
            proactor.submit_io(op);
        }
        for completion in self.fx.completions.drain(..) {
            if completion.owner == self.index {
                self.own.push(completion);
            } else if let Some(list) = self.outgoing.get_mut(completion.owner as usize) {
                list.push(completion);
            }
        }
        for (thread, list) in self.outgoing.iter_mut().enumerate() {
            if !list.is_empty() {
                shared.inbox(thread as u32).complete(list);
            }
        }
    }
}
