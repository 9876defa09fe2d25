//! Calls to the lock manager and to the status monitor.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::flight::{About, Flight, Job};
use super::link::{Answer, Link};
use super::service::{Caller, Served, Service, Taken};
use crate::access::{Peer, Rights, Want, Who, is_own};
use crate::handle::{self, Key};
use crate::nlm::locks::Asking;
use crate::nlm::{self, Args, Lock, Status};
use crate::nsm;
use crate::rpc::{self, Call, Credential};
use crate::v3::Kind;
use crate::xdr::{Reader, Writer};

/// Memory of a lock call, beyond its message: its file, its owner and its answer.
const LOCK_BYTES: usize = 8 << 10;

/// A lock as it waits for its turn, with its strings.
struct Owned {
    caller: Vec<u8>,
    file: Vec<u8>,
    owner: Vec<u8>,
    process: i32,
    offset: u64,
    len: u64,
}

impl Owned {
    fn of(lock: &Lock<'_>) -> Owned {
        Owned {
            caller: lock.caller.to_vec(),
            file: lock.file.to_vec(),
            owner: lock.owner.to_vec(),
            process: lock.process,
            offset: lock.offset,
            len: lock.len,
        }
    }

    fn as_lock(&self) -> Lock<'_> {
        Lock {
            caller: &self.caller,
            file: &self.file,
            owner: &self.owner,
            process: self.process,
            offset: self.offset,
            len: self.len,
        }
    }
}

impl Service {
    /// Answers a call to the lock manager. Only a lock waits for a worker, which looks at the file's mode.
    pub(super) fn nlm(
        &self,
        link: &Arc<Link>,
        caller: &Caller,
        call: &Call,
        args: &mut Reader<'_>,
    ) -> Taken {
        let now = |answer: Writer| {
            link.send(Answer::from(answer));
            Taken::Answered(None)
        };
        let xid = call.xid;
        if call.version != nlm::VERSION {
            return now(rpc::wrong_version(xid, nlm::VERSION, nlm::VERSION));
        }
        let (args, cookie) = match Args::read(call.procedure, args) {
            None => return now(rpc::no_procedure(xid)),
            Some(Err(_)) => return now(rpc::garbage(xid)),
            Some(Ok(read)) => read,
        };
        if matches!(call.credential, Credential::Unknown(_)) && args != Args::Null {
            return now(rpc::weak_credential(xid));
        }
        let client = caller.peer.address();
        let answer = |status| now(nlm::answer(xid, cookie, status));
        match args {
            Args::Null => now(rpc::success(xid)),
            // No lock waits here: the client asks again.
            Args::Cancel => answer(Status::Granted),
            Args::Share => now(nlm::shared(xid, cookie, Status::NoLocks)),
            Args::Unshare => now(nlm::shared(xid, cookie, Status::Granted)),
            Args::FreeAll { name } => {
                self.restarted(caller.peer, name, None);
                now(rpc::success(xid))
            }
            Args::Unlock { lock } => answer(match self.locked(&lock, caller) {
                Ok((served, _, key)) => served.export.locks.unlock(&key, &lock, client),
                Err(status) => status,
            }),
            Args::Test { exclusive, lock } => {
                match self.lockable(&lock, caller, false, exclusive) {
                    Ok((served, _, key)) => {
                        match served.export.locks.test(&key, &lock, exclusive, client) {
                            Ok(holder) => now(nlm::tested(xid, cookie, holder)),
                            Err(status) => answer(status),
                        }
                    }
                    Err(status) => answer(status),
                }
            }
            Args::Lock {
                block,
                exclusive,
                lock,
                reclaim,
                state,
                monitored,
            } => {
                let (served, rights, key) = match self.lockable(&lock, caller, reclaim, exclusive) {
                    Ok(found) => found,
                    Err(status) => return answer(status),
                };
                let by = Asking {
                    address: client,
                    user: caller.user,
                    server: caller.own,
                    state,
                    monitored,
                };
                let who = Who::of(&call.credential, rights);
                let job: Job = {
                    let (served, lock) = (Arc::clone(&served), Owned::of(&lock));
                    let cookie = cookie.to_vec();
                    Box::new(move |flight, _| {
                        let lock = lock.as_lock();
                        let status = acquire(&served, &who, &key, &lock, exclusive, by);
                        let granted = status == Status::Granted;
                        let told = match status {
                            Status::Denied if block => Status::Blocked,
                            status => status,
                        };
                        let answer = Answer::from(nlm::answer(xid, &cookie, told));
                        let in_time = flight.finish_in_time(answer);
                        if granted && !in_time {
                            // Its client was answered that it has none.
                            served.export.locks.unlock(&key, &lock, by.address);
                        }
                    })
                };
                let about = About {
                    xid,
                    procedure: None,
                    spot: key,
                    slip: None,
                    later: nlm::answer(xid, cookie, Status::NoLocks).into_vec(),
                };
                let flight = Flight::new(
                    about,
                    job,
                    Arc::clone(link),
                    link.call(LOCK_BYTES),
                    Arc::clone(&served.pool),
                    Arc::clone(&self.replies),
                );
                if served.pool.submit(Arc::clone(&flight)) {
                    Taken::Answered(Some(flight))
                } else {
                    flight.expire();
                    Taken::Answered(None)
                }
            }
        }
    }

    /// The file of a lock, and what its client may do.
    fn locked(
        &self,
        lock: &Lock<'_>,
        caller: &Caller,
    ) -> Result<(Arc<Served>, Rights, Key), Status> {
        let store = handle::store(lock.file).ok_or(Status::StaleHandle)?;
        let exports = self.exports();
        let served = exports.iter().find(|s| s.export.store == store);
        let served = Arc::clone(served.ok_or(Status::StaleHandle)?);
        let rights = served.rights(caller.peer).ok_or(Status::Failed)?;
        let key = served.export.sealer.open(lock.file);
        Ok((served, rights, key.ok_or(Status::StaleHandle)?))
    }

    /// The same, if a lock can be had at this time.
    fn lockable(
        &self,
        lock: &Lock<'_>,
        caller: &Caller,
        reclaim: bool,
        exclusive: bool,
    ) -> Result<(Arc<Served>, Rights, Key), Status> {
        if !self.locks.load(Ordering::Relaxed) {
            return Err(Status::NoLocks);
        }
        let found = self.locked(lock, caller)?;
        let (served, rights, _) = &found;
        lock.range().ok_or(Status::TooBig)?;
        if exclusive && !rights.write {
            return Err(Status::ReadOnly);
        }
        let client = caller.peer.address();
        served
            .export
            .locks
            .refused(client, reclaim)
            .map_or(Ok(found), Err)
    }

    /// Answers a call to the status monitor. This host's own lock manager finds none here: it needs one that monitors
    /// other servers for it, and starts that where none answers.
    pub(super) fn nsm(&self, client: Peer, call: &Call, args: &mut Reader<'_>) -> Writer {
        if is_own(client.address()) {
            return rpc::no_program(call.xid);
        }
        let (answer, notice) = nsm::answer(call, args);
        if let Some(notice) = notice {
            self.restarted(client, notice.name, Some(notice.state));
        }
        answer
    }

    fn restarted(&self, client: Peer, name: &[u8], state: Option<i32>) {
        let exports = self.exports();
        for served in exports.iter().filter(|s| s.rights(client).is_some()) {
            let locks = &served.export.locks;
            locks.restarted(client.address(), name, state);
        }
    }
}

/// Locks a range, if the file's mode lets its user do so: a lock that keeps others from reading or writing is for those who may write.
fn acquire(
    served: &Served,
    who: &Who,
    key: &Key,
    lock: &Lock<'_>,
    exclusive: bool,
    by: Asking,
) -> Status {
    let attributes = match served.export.tree.attributes(key) {
        Ok(attributes) => attributes,
        Err(crate::v3::Status::Stale) => return Status::StaleHandle,
        Err(_) => return Status::NoLocks,
    };
    if attributes.kind != Kind::Regular {
        return Status::Failed;
    }
    let want = if exclusive { Want::Write } else { Want::Read };
    // The owner opened it before its mode was changed.
    if who.uid != attributes.uid && !who.may(&attributes, want as u32) {
        return Status::Failed;
    }
    served.export.locks.lock(key, lock, exclusive, by)
}
