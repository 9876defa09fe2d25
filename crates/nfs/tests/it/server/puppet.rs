//! A tree whose files wait where a test holds them.

use std::collections::{HashMap, HashSet};
use std::sync::{Condvar, Mutex};
use std::time::Duration;

use hearth_nfs::access::Who;
use hearth_nfs::handle::{Key, Sealer};
use hearth_nfs::tree::{
    AtHand, Changed, Done, Entry, Found, Outcome, Place, Read, Room, Tree, Write, Written,
};
use hearth_nfs::v3::{Attributes, Create, Kind, SetAttributes, Status, Time, Wcc};

use super::{SECRET, STORE};

#[derive(Default)]
pub struct State {
    pub held: HashSet<Key>,
    /// What was begun, and what was ended, in order.
    pub begun: Vec<String>,
    pub ended: Vec<String>,
    pub content: HashMap<Key, Vec<u8>>,
    pub who: Option<Who>,
    /// Reads that hang where they hold no thread of the server's.
    pub away: Vec<Done<Outcome<Read>>>,
}

/// A tree whose files wait where a test holds them.
#[derive(Default)]
pub struct Puppet {
    pub state: Mutex<State>,
    pub bell: Condvar,
}

pub fn key(name: &str) -> Key {
    Key::new(name.as_bytes()).expect("short")
}

pub fn handle(name: &str) -> Vec<u8> {
    Sealer::new(STORE, &SECRET).seal(&key(name))
}

impl Puppet {
    pub fn hold(&self, name: &str) {
        self.state.lock().expect("whole").held.insert(key(name));
    }

    pub fn release(&self, name: &str) {
        self.state.lock().expect("whole").held.remove(&key(name));
        self.bell.notify_all();
    }

    /// Waits until something is true of what happened.
    pub fn wait(&self, what: impl Fn(&State) -> bool) {
        let state = self.state.lock().expect("whole");
        let long = Duration::from_secs(30);
        let (state, timeout) = self
            .bell
            .wait_timeout_while(state, long, |s| !what(s))
            .expect("whole");
        drop(state);
        assert!(!timeout.timed_out(), "it never happened");
    }

    pub fn begun(&self, what: &str) -> usize {
        self.state
            .lock()
            .expect("whole")
            .begun
            .iter()
            .filter(|b| *b == what)
            .count()
    }

    /// What hangs elsewhere ends.
    pub fn come_back(&self) {
        let away = std::mem::take(&mut self.state.lock().expect("whole").away);
        for done in away {
            done.tell(Err(Status::Io));
        }
    }

    pub fn pass(&self, who: &Who, file: &Key, what: &str) {
        let line = format!("{what} {}", String::from_utf8_lossy(file.bytes()));
        let mut state = self.state.lock().expect("whole");
        state.who = Some(who.clone());
        state.begun.push(line.clone());
        self.bell.notify_all();
        while state.held.contains(file) {
            state = self.bell.wait(state).expect("whole");
        }
        state.ended.push(line);
        self.bell.notify_all();
    }
}

pub fn attributes(size: u64) -> Attributes {
    Attributes {
        kind: Kind::Regular,
        mode: 0o644,
        links: 1,
        uid: 0,
        gid: 0,
        size,
        used: size,
        device: (0, 0),
        tree: STORE,
        id: 1,
        accessed: Time::default(),
        modified: Time::default(),
        changed: Time::default(),
    }
}

pub fn no<T>() -> Changed<T> {
    Changed {
        outcome: Err(Status::NotSupp),
        wcc: Wcc::default(),
    }
}

/// A file nobody has to wait for.
pub struct Near;

impl AtHand for Near {
    fn read(self: Box<Self>, _: &Who, _: u64, count: u32, done: Done<Outcome<Read>>) {
        done.tell(Ok(Read {
            data: Box::new(vec![9; count as usize]),
            end: true,
            attributes: None,
        }));
    }
    fn write(self: Box<Self>, _: &Who, write: Write, done: Done<Changed<Written>>) {
        done.tell(Changed {
            outcome: Ok(Written {
                count: write.data.as_ref().len() as u32,
                stable: write.stable,
                verifier: *b"at hand.",
            }),
            wcc: Wcc::default(),
        });
    }
}

impl Tree for Puppet {
    fn root(&self) -> Key {
        key("root")
    }
    fn attributes(&self, file: &Key) -> Outcome<Attributes> {
        if *file == key("looked at") {
            self.pass(&Who::root(), file, "look");
        }
        let kind = if *file == self.root() {
            Kind::Directory
        } else {
            Kind::Regular
        };
        Ok(Attributes {
            kind,
            ..attributes(0)
        })
    }
    fn set_attributes(
        &self,
        who: &Who,
        file: &Key,
        _: &SetAttributes,
        _: Option<Time>,
    ) -> Changed<()> {
        self.pass(who, file, "set");
        Changed {
            outcome: Ok(()),
            wcc: Wcc::default(),
        }
    }
    fn lookup(&self, _: &Who, _: &Key, _: &[u8]) -> Outcome<Found> {
        Err(Status::NoEnt)
    }
    fn read_link(&self, _: &Who, _: &Key) -> Outcome<Vec<u8>> {
        Err(Status::NotSupp)
    }
    fn at_hand(&self, file: &Key, write: Option<Place>) -> Option<Box<dyn AtHand>> {
        let at_hand = *file == key("at hand") && write.is_none_or(|place| place.offset == 0);
        at_hand.then_some(Box::new(Near) as Box<dyn AtHand>)
    }
    fn read(&self, who: &Who, file: &Key, _: u64, count: u32, done: Done<Outcome<Read>>) {
        self.pass(who, file, "read");
        if *file == key("away") {
            self.state.lock().expect("whole").away.push(done);
        } else if *file != key("lost") {
            done.tell(Ok(Read {
                data: Box::new(vec![7; count as usize]),
                end: false,
                attributes: None,
            }));
        }
    }
    fn write(&self, who: &Who, file: &Key, write: Write, done: Done<Changed<Written>>) {
        self.pass(who, file, "write");
        let data = write.data.as_ref().to_vec();
        let count = data.len() as u32;
        self.state
            .lock()
            .expect("whole")
            .content
            .insert(*file, data);
        let written = Written {
            count,
            stable: write.stable,
            verifier: *b"verifier",
        };
        done.tell(Changed {
            outcome: Ok(written),
            wcc: Wcc::default(),
        });
    }
    fn commit(&self, _: &Who, _: &Key, _: u64, _: u32, done: Done<Changed<[u8; 8]>>) {
        done.tell(Changed {
            outcome: Ok(*b"verifier"),
            wcc: Wcc::default(),
        });
    }
    fn create(&self, who: &Who, dir: &Key, name: &[u8], _: &Create<'_>) -> Changed<Found> {
        self.pass(who, dir, "create");
        // As real trees do: the second time it is there.
        let file = Key::new(name).expect("short");
        let there = self
            .state
            .lock()
            .expect("whole")
            .content
            .insert(file, Vec::new())
            .is_some();
        let found = Found {
            key: file,
            attributes: attributes(0),
        };
        Changed {
            outcome: if there { Err(Status::Exist) } else { Ok(found) },
            wcc: Wcc::default(),
        }
    }
    fn remove(&self, _: &Who, _: &Key, _: &[u8], _: bool) -> Changed<()> {
        no()
    }
    fn rename(&self, _: &Who, _: (&Key, &[u8]), _: (&Key, &[u8])) -> (Outcome<()>, Wcc, Wcc) {
        (Err(Status::NotSupp), Wcc::default(), Wcc::default())
    }
    fn link(&self, _: &Who, _: &Key, _: &Key, _: &[u8]) -> Changed<Attributes> {
        no()
    }
    fn list(
        &self,
        _: &Who,
        _: &Key,
        cookie: u64,
        _: bool,
        take: &mut dyn FnMut(Entry<'_>) -> bool,
    ) -> Outcome<bool> {
        for n in cookie..1000 {
            let name = format!("name-{n}");
            if !take(Entry {
                id: n,
                name: name.as_bytes(),
                cookie: n + 1,
                found: None,
            }) {
                return Ok(false);
            }
        }
        Ok(true)
    }
    fn room(&self) -> Outcome<Room> {
        Err(Status::NotSupp)
    }
}
