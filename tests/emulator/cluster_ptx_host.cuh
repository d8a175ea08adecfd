// Stands in for common/cluster_ptx.cuh: the same functions in C++, for the blocks of a cluster, whose threads are fibers of
// one thread. A shared-memory address holds the block's rank above 24 bits of offset.
namespace onnxfuse {

inline int cluster_rank() { return emulator::cluster.rank; }
inline unsigned own_address(unsigned address) { return address | static_cast<unsigned>(cluster_rank()) << 24; }
inline unsigned peer_address(unsigned shared, int rank) {
  return (shared & 0xffffff) | static_cast<unsigned>(rank) << 24;
}

// ---- mbarrier

struct HostBarrier {
  int bytes;
  short pending;
  unsigned short count : 15, parity : 1;
};
static_assert(sizeof(HostBarrier) == 8);

inline HostBarrier& host_barrier(unsigned address) {
  return *reinterpret_cast<HostBarrier*>(emulator::shared(address, 8));
}

inline void update(HostBarrier& barrier, int arrivals, int bytes) {
  barrier.pending -= arrivals;
  barrier.bytes += bytes;
  if (barrier.pending < 0) emulator::fail("more arrivals than a phase of a barrier has");
  if (barrier.pending > 0 || barrier.bytes != 0) return;
  barrier.pending = barrier.count;
  barrier.parity ^= 1;
}

inline void barrier_init(unsigned barrier, int arrivals) {
  host_barrier(barrier) = {0, static_cast<short>(arrivals), static_cast<unsigned short>(arrivals), 0};
}
inline void barrier_init_fence() {}
inline void barrier_arrive(unsigned barrier) { update(host_barrier(barrier), 1, 0); }
inline void barrier_arrive_expect(unsigned barrier, int bytes) { update(host_barrier(barrier), 1, bytes); }
inline void barrier_arrive_peer(unsigned barrier, int rank) { barrier_arrive(peer_address(barrier, rank)); }
inline void barrier_wait(unsigned barrier, int parity) {
  for (bool newest = false; host_barrier(barrier).parity == parity; newest = !newest) {
    emulator::cluster.land(newest);
    emulator::yield();
  }
}

// ---- clusters

inline void cluster_meet() { emulator::wait(emulator::cluster.all); }

// In turn, by each thread: it waits for the end of the phase in which it arrived last.
inline void cluster_arrive() {
  emulator::phase_of_arrival() = emulator::cluster.all.generation;
  emulator::arrive(emulator::cluster.all);
}
inline void cluster_wait() {
  const int phase = emulator::phase_of_arrival();
  while (emulator::cluster.all.generation == phase) emulator::yield();
}

template <typename Vector>
inline void store_later(unsigned peer, Vector values, unsigned barrier) {
  emulator::cluster.later([=] {
    memcpy(emulator::shared(peer, sizeof(values)), &values, sizeof(values));
    update(host_barrier(barrier), 0, -static_cast<int>(sizeof(values)));
  });
}

inline void store_peer(unsigned peer, float4 values, unsigned barrier) { store_later(peer, values, barrier); }
inline void store_peer(unsigned peer, float2 values, unsigned barrier) { store_later(peer, values, barrier); }

inline void pin(float&) {}
inline void pin(int&) {}

}  // namespace onnxfuse
